"""One writer a folder; the others get one line that names it, and what a crash left is taken over."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing import checkpoint_directory, save
from core.dist_checkpointing.format import folder_lock
from core.dist_checkpointing.format.folder_lock import LOCK_FILE, hold_folder
from core.errors import CheckpointError


def _holds(root: Path, connection) -> None:
    with hold_folder(root):
        connection.send(os.getpid())
        connection.recv()


@pytest.fixture
def holder(tmp_path: Path):
    """Starts another process that holds the lock of a folder; gives its id, and ends it when sent something."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_holds, args=(tmp_path / "run", theirs))
    process.start()
    yield ours.recv(), ours, process
    process.kill()
    process.join()


def test_a_second_writer_learns_who_the_first_is(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.1)
    pid, connection, process = holder
    with pytest.raises(CheckpointError, match=rf"run is in use by process {pid} on \S+ since 20\S+; wait") as caught:
        hold_folder(tmp_path / "run").__enter__()
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"in use by process {pid}"):
        save({"w": torch.ones(2)}, checkpoint_directory(tmp_path / "run", 1), metadata={})
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]
    connection.send("end")
    process.join()
    assert process.exitcode == 0
    with hold_folder(tmp_path / "run"), hold_folder(tmp_path / "run"):
        save({"w": torch.ones(2)}, checkpoint_directory(tmp_path / "run", 1), metadata={})
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["process"] == os.getpid()
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_crash_releases_the_lock(tmp_path, holder):
    pid, _, process = holder
    os.kill(pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with hold_folder(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["process"] == os.getpid()


def test_the_content_of_a_foreign_lock_is_not_trusted(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.1)
    for text in ("", "[]", '{"process": "x"}', "[" * 500):
        (tmp_path / "run" / LOCK_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="in use by another process"):
            hold_folder(tmp_path / "run").__enter__()
