"""The folder in memory of a launcher: which of the old ones it removes, and that no other launcher removes its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.training.launch import copies_folder
from core.training.launch.copies_folder import memory_for_copies
from core.training.launch.generations import COPIES_FOLDER


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copies_folder, "_MEMORY", tmp_path)
    return tmp_path


def _left(memory: Path, name: str = "left") -> Path:
    folder = memory / f"{copies_folder._PREFIX}{name}"
    (folder / "generation_00001").mkdir(parents=True)
    return folder


def test_folders_of_killed_launchers_are_removed_and_no_others(memory: Path):
    dead = _left(memory)
    (memory / "elsewhere").mkdir()
    (memory / f"{copies_folder._PREFIX}link").symlink_to(memory / "elsewhere")
    (memory / f"{copies_folder._PREFIX}file").touch()
    os.mkfifo(memory / f"{copies_folder._PREFIX}pipe")
    with memory_for_copies(is_needed=True) as first, memory_for_copies(is_needed=True) as second:
        own, other = (Path(variables[COPIES_FOLDER]) for variables in (first, second))
        assert own != other
        assert own.is_dir()
        assert other.is_dir()
    assert not any(folder.exists() for folder in (dead, own, other))
    left = [path.name.removeprefix(copies_folder._PREFIX) for path in memory.iterdir()]
    assert sorted(left) == ["elsewhere", "file", "link", "pipe"]
    assert list((memory / "elsewhere").iterdir()) == []


def test_what_another_user_left_is_not_locked(memory: Path, monkeypatch: pytest.MonkeyPatch):
    folder, locked = _left(memory), []
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(copies_folder.fcntl, "flock", lambda *arguments: locked.append(arguments))
    with pytest.raises(ConfigError, match="no folder can be made"), memory_for_copies(is_needed=True):
        pass  # nor is its own, which that user made
    assert folder.is_dir()
    assert locked == []


def _sweep() -> None:
    for folder in copies_folder._MEMORY.glob(f"{copies_folder._PREFIX}*"):
        if (lock := copies_folder._locked(folder)) is not None:
            copies_folder._remove(folder, lock)


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked", "while it is swept"])
def test_a_launcher_and_a_sweeper_never_have_the_same_folder(memory: Path, monkeypatch: pytest.MonkeyPatch, when: str):
    made, swept = [], []
    make, lock = tempfile.mkdtemp, copies_folder.fcntl.flock

    def making(**place):
        made.append(make(**place))
        if len(made) == 1 and when == "before it is opened":
            _sweep()
        if len(made) == 1 and when == "while it is swept":
            swept.append(copies_folder._locked(Path(made[0])))
        return made[-1]

    def locking(descriptor, how):
        if len(made) == 1 and when == "before it is locked" and not swept:
            swept.append(True)
            _sweep()
        lock(descriptor, how)

    monkeypatch.setattr(tempfile, "mkdtemp", making)
    monkeypatch.setattr(copies_folder.fcntl, "flock", locking)
    with memory_for_copies(is_needed=True) as variables:
        own = Path(variables[COPIES_FOLDER])
        assert str(own) == made[1]  # another one
        if when == "while it is swept":
            copies_folder._remove(Path(made[0]), swept[0])
        _sweep()
        assert own.is_dir()
    assert list(memory.iterdir()) == []


def test_a_sweeper_that_waited_removes_nothing(memory: Path, monkeypatch: pytest.MonkeyPatch):
    folder, lock = _left(memory), copies_folder.fcntl.flock

    def removed_and_made_again(descriptor, how):
        shutil.rmtree(folder)
        _left(memory)
        lock(descriptor, how)

    monkeypatch.setattr(copies_folder.fcntl, "flock", removed_and_made_again)
    assert copies_folder._locked(folder) is None


def test_memory_where_no_folder_can_be_made_is_one_line(memory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies_folder, "_MEMORY", memory / "absent")
    with pytest.raises(ConfigError, match="absent, where no folder can be made; use restart"):
        memory_for_copies(is_needed=True).__enter__()
