"""Files that wait for a full disk are written when it has room, with one warning for all of them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from core.training.log_file import OptionalFiles, read_log
from core.training.run_log import RunLog
from tests.unit.training._configs import small_config
from tests.unit.training.test_run_log import write


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

    with RunLog(config, tmp_path, 0, enabled=True) as log:
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

    with RunLog(small_config(log_interval=1, train_iters=2), tmp_path, 0, enabled=True) as log:
        log.model(Model(), 1)
        write(log, 1, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]
    err = capsys.readouterr().err
    assert f"{name} cannot be written (No space left on device)" in err
    assert f"warning: not written: {tmp_path / name}" in err
