"""The memory of a step is written and drawn with its peak."""

from __future__ import annotations

import json

from core.training.memory_timeline import PICTURE_FILE, SERIES_FILE, MemoryTimeline, write_timeline


def test_the_picture_and_the_series_show_the_peak(tmp_path):
    held = tuple((5, 0, 1, 2, 100 if i == 4321 else i % 7) for i in range(10_000))
    timeline = MemoryTimeline("cpu", tuple(float(i) for i in range(10_000)), held)
    write_timeline(timeline, tmp_path, 3)
    series = json.loads((tmp_path / SERIES_FILE).read_text())
    assert series["peak_bytes"] == timeline.peak_bytes == 108
    assert series["peak_at_s"] == 4321.0
    assert series["bytes_at_peak"]["activations and other"] == 100
    assert max(series["bytes"]["activations and other"]) == 100
    assert len(series["time_s"]) == len(series["bytes"]["parameters"]) == 2000
    assert (tmp_path / PICTURE_FILE).stat().st_size > 1000
