"""The log of a run of the training application, which is `core.run_log` with what a GPT has besides."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.run_log import read_log
from tests.unit._program import TINY, run_program


def test_a_run_logs_norms_of_layers_for_a_tracker(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--train-iters", "5", "--log-interval", "2", "--log-layer-norms", "--trackers", "tensorboard")
    ended = run_program("pretrain_gpt", *TINY, *flags, "--data-path", corpus, "--save", "run", folder=tmp_path)
    assert ended.status == 0, ended.err
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        assert line["step_s"] > 0 and line["tokens_per_s"] > 0
        of_layers = [line[name] for name in line if name.startswith("grad_norm/")]
        assert len(of_layers) >= 3
        # The norm of the model is that of the layers' norms: each is of the step of its line.
        assert sum(norm**2 for norm in of_layers) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-6)
        assert all(line[name] > 0 for name in line if name.startswith("update_norm/"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])
    shown = [text for text in ended.err.splitlines() if text.startswith("step ")]
    assert [text.partition(":")[0] for text in shown if "loss " in text and "tok/s" in text] == [
        "step 2/5", "step 4/5", "step 5/5"
    ]  # fmt: skip
