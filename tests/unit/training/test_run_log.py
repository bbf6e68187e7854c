"""The log: what is written when, by whom, and that a resumed run writes every step once."""

from __future__ import annotations

import json
import math

import pytest

from core.base.errors import CheckpointError
from core.training.log_file import Stopwatch, read_log
from core.training.run_log import RunLog
from core.training.train_step import StepResult
from tests.unit.training._configs import small_config


def result(loss: float, updated: bool = True) -> StepResult:
    norm = 0.5 if updated else None
    return StepResult(loss=loss, updated=updated, grad_norm=norm, num_zeros=None, stop=False, lr=0.1, loss_scale=1.0)


def write(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.step(step, result(float(step), step != 2), num_tokens=100, seconds=0.5)


def test_a_line_holds_what_came_since_the_last(tmp_path):
    with RunLog(small_config(log_interval=2, train_iters=5), tmp_path, 0, enabled=True) as log:
        write(log, 1, 5)
        log.validation(5, math.nan)
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 5, 5]
    assert [line.get("loss") for line in lines] == [1.5, 3.5, 5.0, None]
    assert lines[0]["skipped"] == 1 and lines[0]["grad_norm"] is None
    assert lines[1]["skipped"] == 0 and lines[1]["grad_norm"] == 0.5
    assert lines[1]["tokens_per_s"] == pytest.approx(200.0)
    assert lines[1]["memory_bytes"] > 1e6
    assert lines[3] == {"step": 5, "validation_loss": None}  # JSON has no NaN
    assert json.loads((tmp_path / "config.json").read_text())["run"]["train_iters"] == 5
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_hash_of_weights_has_a_line_when_no_other_is_due(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    folders = {"tensorboard_dir": tmp_path / "tb"}
    with RunLog(small_config(log_interval=2, train_iters=4, **folders), tmp_path, 0, enabled=True) as log:
        for step, hashed in ((1, "0a1b"), (2, "2c3d"), (3, None), (4, None)):
            log.step(step, result(1.0), num_tokens=1, seconds=1.0, weights_hash=hashed)
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[0] == {"step": 1, "weights_hash": "0a1b"}
    assert [(line["step"], line.get("weights_hash")) for line in lines[1:]] == [(2, "2c3d"), (4, None)]
    assert "iteration 2: weights 2c3d" in capsys.readouterr().err


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path):
    config = small_config(log_interval=1, train_iters=4)
    with RunLog(config, tmp_path, 0, enabled=True) as log:
        write(log, 1, 4)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash while writing
    with RunLog(config, tmp_path, 2, enabled=True) as log:
        write(log, 3, 4)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4]


def test_another_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(CheckpointError, match=r"log\.jsonl is not the log of a run"):
        RunLog(small_config(), tmp_path, 0, enabled=True)
    assert (tmp_path / "log.jsonl").read_text() == '{"other": 1}\n'


def test_other_ranks_and_runs_without_a_folder_write_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog(small_config(tensorboard_dir=tmp_path / "tb"), tmp_path / "run", 0, enabled=False) as log:
        write(log, 1, 2)
    assert capsys.readouterr().err == ""
    with RunLog(small_config(), None, 0, enabled=True) as log:
        write(log, 1, 2)
    assert list(tmp_path.iterdir()) == []
    assert "loss=2.000" in capsys.readouterr().err


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(small_config(tensorboard_dir=tmp_path / "tb", log_interval=1), None, 0, enabled=True) as log:
        write(log, 1, 3)
        log.validation(3, 2.5)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(3, 2.5)]


def test_a_stopwatch_starts_again_when_read(monkeypatch):
    now = iter([1.0, 3.0, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    assert (watch.read(), watch.read()) == (2.0, 0.5)
