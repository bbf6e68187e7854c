"""The log: what is written when, by whom, once for every step of a resumed run, and later where a disk is full."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from core.base.errors import CheckpointError
from core.training.run_log import OptionalFiles, RunLog, read_log
from core.training.train_step import StepResult
from tests.unit.training._configs import small_config


def result(loss: float, updated: bool = True) -> StepResult:
    norm = 0.5 if updated else None
    return StepResult(
        loss=loss, has_update=updated, grad_norm=norm, num_zeros=None, stop=False, lr=0.1, loss_scale=1.0
    )


def write(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.step(step, result(float(step), step != 2), num_tokens=100, seconds=0.5)


def test_a_line_holds_what_came_since_the_last(tmp_path):
    with RunLog(small_config(log_interval=2, train_iters=5), tmp_path, 0, is_writer=True) as log:
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
    with RunLog(small_config(log_interval=2, train_iters=4, **folders), tmp_path, 0, is_writer=True) as log:
        for step, hashed in ((1, "0a1b"), (2, "2c3d"), (3, None), (4, None)):
            log.step(step, result(1.0), num_tokens=1, seconds=1.0, weights_hash=hashed)
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[0] == {"step": 1, "weights_hash": "0a1b"}
    assert [(line["step"], line.get("weights_hash")) for line in lines[1:]] == [(2, "2c3d"), (4, None)]
    assert "iteration 2: weights 2c3d" in capsys.readouterr().err


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path):
    config = small_config(log_interval=1, train_iters=4)
    with RunLog(config, tmp_path, 0, is_writer=True) as log:
        write(log, 1, 4)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash while writing
    with RunLog(config, tmp_path, 2, is_writer=True) as log:
        write(log, 3, 4)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4]


def test_another_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(CheckpointError, match=r"log\.jsonl is not the log of a run"):
        RunLog(small_config(), tmp_path, 0, is_writer=True)
    assert (tmp_path / "log.jsonl").read_text() == '{"other": 1}\n'


def test_other_ranks_and_runs_without_a_folder_write_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog(small_config(tensorboard_dir=tmp_path / "tb"), tmp_path / "run", 0, is_writer=False) as log:
        write(log, 1, 2)
    assert capsys.readouterr().err == ""
    with RunLog(small_config(), None, 0, is_writer=True) as log:
        write(log, 1, 2)
    assert list(tmp_path.iterdir()) == []
    assert "loss=2.000" in capsys.readouterr().err


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(small_config(tensorboard_dir=tmp_path / "tb", log_interval=1), None, 0, is_writer=True) as log:
        write(log, 1, 3)
        log.validation(3, 2.5)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(3, 2.5)]


class Disk:
    """A disk that is full while `full` is set."""

    def __init__(self) -> None:
        self.full, self.written = False, list[str]()

    def write(self, name: str) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written.append(name)


def test_waiting_lines_warn_once_and_are_reported_when_written():
    disk, said = Disk(), list[str]()
    files = OptionalFiles(said.append)
    files.write(Path("a"), lambda: disk.write("a"))
    disk.full = True
    for name in ("log", "page", "log"):
        files.write(Path(name), lambda name=name: disk.write(name))
        files.retry()
    assert said == [
        "warning: log cannot be written (No space left on device): logs, pages and plots pause, and training goes on"
    ]
    assert files.waiting == [Path("log"), Path("page")]
    disk.full = False
    files.retry()
    assert disk.written == ["a", "log", "page"] and files.waiting == []
    assert said[1:] == ["logs, pages and plots are written again"]
    disk.full = True
    files.write(Path("log"), lambda: disk.write("log"))
    assert len(said) == 3


def test_a_log_line_cut_by_a_full_disk_is_written_whole_later(tmp_path, monkeypatch, capsys):
    config = small_config(log_interval=1, train_iters=6)
    opened = Path.open

    class LittleRoom:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self.file.close()

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:20])  # as write(2) does when the disk fills up

    def in_little_room(path, mode="r", *args, **kwargs):
        file = opened(path, mode, *args, **kwargs)
        return LittleRoom(file) if mode == "ab" else file

    with RunLog(config, tmp_path, 0, is_writer=True) as log:
        write(log, 1, 2)
        monkeypatch.setattr(Path, "open", in_little_room)
        write(log, 3, 4)
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3  # two, and a part
        monkeypatch.undo()
        write(log, 5, 6)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().err.count("warning: ") == 1


@pytest.mark.parametrize("name", ["model.html", "loss.png", "config.json"])
def test_pages_and_plots_that_cannot_be_written_end_nothing(tmp_path, monkeypatch, capsys, name):
    def full(*_args, **_options) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log_module = "core.training.run_log"
    targets = {"loss.png": f"{log_module}.draw_loss_curve", "config.json": f"{log_module}.write_durably"}
    monkeypatch.setattr(targets.get(name, "pathlib.Path.write_text"), full)

    class Model:
        def describe(self, *_args, **_options) -> str:
            return "a page"

    with RunLog(small_config(log_interval=1, train_iters=2), tmp_path, 0, is_writer=True) as log:
        log.model(Model(), 1)
        write(log, 1, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]
    err = capsys.readouterr().err
    assert f"{name} cannot be written (No space left on device)" in err
    assert f"warning: not written: {tmp_path / name}" in err
