"""Benchmarks append their ratios as lines of JSON, unless they are asked not to, and the site draws them."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit._benchmark_modules import BENCHMARKS, load

KEYS = ("date", "commit", "machine", "device", "torch", "benchmark", "row", "ratio", "spread", "rounds")


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("_history")
    monkeypatch.setattr(module._State, "path", None)
    monkeypatch.setattr(module._State, "heading", "")
    return module


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "docs"))
    import history

    return history


def _started(history: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/some_benchmark.py", *arguments])
    history.Parser("Measures something.").parse_args()


def test_a_row_is_one_line(history: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load("_measure")
    _started(history, monkeypatch, "--history", str(tmp_path / "history.jsonl"))
    seconds = [1.0 + 0.01 * index for index in range(15)]
    with measure.section("two ranks"):
        load("_report").judge("time", seconds, [2.0] * 15)
    history.head("")
    history.record("bytes / formula", 1.25)
    first, second = (json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines())
    assert tuple(first) == tuple(second) == KEYS
    assert first["benchmark"] == "some_benchmark" and first["row"] == "two ranks: time"
    low, high = first["spread"]
    assert first["rounds"] == 15 and low < first["ratio"] < high
    assert first["ratio"] == pytest.approx(0.535)
    assert second["row"] == "bytes / formula" and second["rounds"] == 1
    assert second["spread"] == [1.25, 1.25] and second["ratio"] == 1.25
    assert datetime.fromisoformat(first["date"]).utcoffset() is not None
    assert first["machine"] == measure.processor() and first["device"] == "CPU"


@pytest.mark.parametrize("how", ["--no-history", "imported"])
def test_nothing_is_appended_when_not_asked(
    how: str, history: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = tmp_path / "history.jsonl"
    monkeypatch.setattr(history, "HISTORY", default)
    if how == "imported":
        history.Parser("Measures something.").parse_args([])
    else:
        _started(history, monkeypatch, how)
    history.record("time", 1.0)
    assert not default.exists()
    _started(history, monkeypatch)
    history.record("time", 1.0)
    assert default.exists()


def test_every_benchmark_has_these_flags() -> None:
    """By the one parser; argparse's own has neither."""
    programs = list(BENCHMARKS.glob("[a-z]*.py"))
    assert len(programs) > 20
    for program in programs:
        text = program.read_text()
        assert "argparse.ArgumentParser(" not in text and re.search(r"\b(Parser|arguments)\(", text), program.name
        assert re.search(r"\b(record|judge|report_memory)\(", text), f"{program.name} records nothing"


def test_committed_lines_are_whole(drawing: Any) -> None:
    lines = [json.loads(line) for line in drawing.HISTORY.read_text().splitlines()]
    assert lines and all(tuple(line) == KEYS for line in lines)
    assert all(line["spread"][0] <= line["ratio"] <= line["spread"][1] and line["rounds"] > 0 for line in lines)
    assert {line["benchmark"] for line in lines} <= {path.stem for path in BENCHMARKS.glob("[a-z]*.py")}


def _line(day: int, **changes: Any) -> str:
    line = {
        "date": f"2026-11-{day:02}T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": "a processor, 2 cores",
        "device": "CPU",
        "torch": "2.13.0",
        "benchmark": "some_benchmark",
        "row": "time",
        "ratio": 0.5 + day / 100,
        "spread": [0.5, 0.9],
        "rounds": 15,
    }
    return json.dumps(line | changes)


def test_a_picture_has_axes_a_legend_and_each_row(drawing: Any) -> None:
    lines = [_line(9), _line(3), _line(5, row="memory"), _line(4, device="a GPU"), _line(1, benchmark="another")]
    found = drawing.by_benchmark(lines)
    assert list(found) == ["another", "some_benchmark"]
    measured = found["some_benchmark"]
    assert [one["date"].day for one in measured] == [3, 4, 5, 9]
    drawn = drawing.picture(measured)
    assert drawn == drawing.picture(measured), "the same lines give another file"
    texts = {text.strip() for text in ElementTree.fromstring(drawn).itertext() if text.strip()}
    assert {"date (UTC)", "ratio to what it is compared with"} <= texts
    assert {"time (a processor, 2 cores)", "time (a GPU)", "memory (a processor, 2 cores)"} <= texts
    section = drawing.section("some_benchmark", measured)
    assert "![Ratios of some_benchmark over dates](history/some_benchmark.svg)" in section
    rows = [row for row in section.splitlines() if row.startswith(("| time", "| memory"))]
    assert len(rows) == 3 and "| time | 0.590 | 0.500 to 0.900 | 15 | 2026-11-09 | `01234567` | 2.13.0 |" in rows
