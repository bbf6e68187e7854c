"""Lines of a log: each step once, in a resumed run too, and later where a disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from core.base.errors import CheckpointError
from core.run_log.files import LinesFile, OptionalFiles, draw_loss_curve, read_log


def _write(path: Path, *steps: int, at_once: bool = True) -> list[str]:
    said = list[str]()
    lines = LinesFile(path, steps[0] if at_once else None, said.append)
    for step in steps:
        lines.begin(step)
        lines.add({"step": step, "loss": float(step)})
    lines.write()
    return said


@pytest.mark.parametrize("at_once", [True, False])
def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path, at_once):
    path = tmp_path / "log.jsonl"
    assert _write(path, 1, 2, 3, 4) == []
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a crash while writing
    assert _write(path, 3, 4, at_once=at_once) == [f"{path}: 2 lines of an earlier run removed, from step 3 on"]
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4]


def test_another_file_of_that_name_is_left_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"other": 1}\n')
    with pytest.raises(CheckpointError, match=r"log\.jsonl is not the log of a run"):
        LinesFile(path, 0, print)
    assert path.read_text() == '{"other": 1}\n'


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


def test_a_log_line_cut_by_a_full_disk_is_written_whole_later(tmp_path, monkeypatch):
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

    path = tmp_path / "log.jsonl"
    lines = LinesFile(path, 0, print)
    lines.add({"step": 1, "loss": 1.0})
    lines.write()
    monkeypatch.setattr(Path, "open", in_little_room)
    lines.add({"step": 2, "loss": 2.0})
    with pytest.raises(OSError, match="No space"):
        lines.write()
    assert len(path.read_text().splitlines()) == 2  # one, and a part
    monkeypatch.undo()
    lines.add({"step": 3, "loss": 3.0})
    lines.write()
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]


def test_the_curve_has_training_and_validation(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "log.jsonl"
    lines = LinesFile(path, 0, print)
    for step in range(3):
        lines.add({"step": step, "loss": 1.0 / (step + 1)})
    lines.add({"step": 2, "validation_loss": None})  # it was not finite
    lines.write()
    draw_loss_curve(path, tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("step", "loss", "training"))
