"""The pointer to the latest checkpoint, and what a reader finds after a crash at the worst moment."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import Retention, checkpoint_directory, latest_checkpoint, load, save, saving
from core.dist_checkpointing.format import folders
from core.dist_checkpointing.format.folders import LOCK_FILE, acquire_folder, release_folder


def _save(folder, value: float = 1.0, keep: Retention | None = None) -> None:
    save({"w": torch.full((2,), value)}, folder, metadata={}, keep=keep)


def _iterations(root) -> list[int]:
    return [int(path.name[5:]) for path in reversed(folders.complete_checkpoints(root))]


def test_the_pointer_follows_each_save(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for iteration in (100, 12_345_678):
        _save(checkpoint_directory(tmp_path, iteration))
        assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, iteration)
    assert [path.name for path in sorted(tmp_path.glob("iter*"))] == ["iter_0000100", "iter_12345678"]
    assert (tmp_path / "latest").read_text() == "iter_12345678\n"


def test_without_a_pointer_the_highest_iteration_is_the_latest(tmp_path):
    for iteration in (9_999_999, 10_000_000):
        _save(checkpoint_directory(tmp_path, iteration))
    (tmp_path / "latest").unlink()
    (tmp_path / "iter_99999999").mkdir()  # empty
    assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, 10_000_000)


@pytest.mark.parametrize("text", ["", "..", "../elsewhere", "/", "iter_0000009", "a\nb"])
def test_a_pointer_to_no_checkpoint_is_an_error(tmp_path, text):
    _save(checkpoint_directory(tmp_path, 1))
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match="latest"):
        latest_checkpoint(tmp_path)


def test_a_crash_between_the_renames_of_a_replacement_is_safe(tmp_path):
    folder = checkpoint_directory(tmp_path, 1)
    _save(folder)
    shutil.copytree(folder, tmp_path / f".{folder.name}.tmp")  # the new one, complete
    folder.rename(tmp_path / f".{folder.name}.old")  # moved aside, and then the machine went down
    assert latest_checkpoint(tmp_path) == folder
    read = torch.zeros(2)
    load({"w": read}, folder)
    assert read.tolist() == [1.0, 1.0]
    _save(folder, 2.0)
    load({"w": read}, folder)
    assert read.tolist() == [2.0, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "latest"]


def test_after_such_a_crash_another_save_restores_the_name(tmp_path):
    folder = checkpoint_directory(tmp_path, 1)
    _save(folder)
    shutil.copytree(folder, tmp_path / f".{folder.name}.tmp")
    folder.rename(tmp_path / f".{folder.name}.old")
    _save(checkpoint_directory(tmp_path, 2))
    assert _iterations(tmp_path) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]


def test_a_leftover_copy_is_not_read_for_a_removed_checkpoint(tmp_path):
    folder = checkpoint_directory(tmp_path, 1)
    _save(folder, 1.0)
    shutil.copytree(folder, tmp_path / f".{folder.name}.old")  # killed before it was removed
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load({"w": torch.zeros(2)}, folder)
    _save(checkpoint_directory(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest"]


def test_rotation_keeps_the_newest_resumable_checkpoint(tmp_path):
    for iteration, finite in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        save(
            {"w": torch.ones(2)},
            checkpoint_directory(tmp_path, iteration),
            metadata={"finite": finite},
            keep=Retention(1),
        )
        assert _iterations(tmp_path) == ([iteration] if finite else [2, iteration])
    _save(checkpoint_directory(tmp_path, 6), keep=Retention(1))
    assert _iterations(tmp_path) == [6]
    for skipped in (1, 2):
        metadata = {"finite": True, "skipped_steps": skipped}
        save({"w": torch.ones(2)}, checkpoint_directory(tmp_path, 6 + skipped), metadata=metadata, keep=Retention(1))
        assert _iterations(tmp_path) == [6, 6 + skipped]


def test_nothing_is_removed_for_an_unreadable_checkpoint(tmp_path, monkeypatch):
    _save(checkpoint_directory(tmp_path, 1), keep=Retention(1))
    honest = saving.np.fromfile

    def misread(*args, **kwargs):
        data = honest(*args, **kwargs)
        data[-1] ^= 1
        return data

    monkeypatch.setattr(saving.np, "fromfile", misread)
    with pytest.raises(CheckpointError, match="does not read back as it was written, in bytes 0 to 8"):
        _save(checkpoint_directory(tmp_path, 2), keep=Retention(1))
    assert _iterations(tmp_path) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest"]


def test_a_pointer_that_misleads_names_what_there_is(tmp_path):
    for iteration in (1, 2):
        _save(checkpoint_directory(tmp_path, iteration))
    (tmp_path / "latest").write_text("iter_0000003")
    with pytest.raises(CheckpointError, match=r"write the name of another one there \(iter_0000002, iter_0000001\)"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (None, [1, 2, 3, 4, 5, 6, 7]),
        (Retention(1), [7]),
        (Retention(3), [5, 6, 7]),
        (Retention(2, 3), [3, 6, 7]),
        (Retention(1, 1), [1, 2, 3, 4, 5, 6, 7]),
        (Retention(9), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_retention_keeps_the_last_and_every_so_many(tmp_path, keep, left):
    (tmp_path / "iter_notes").mkdir()
    (tmp_path / "iter_0000000").mkdir()  # no checkpoint, so not ours to remove
    for iteration in range(1, 8):
        _save(checkpoint_directory(tmp_path, iteration), keep=keep)
    assert _iterations(tmp_path) == left
    assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, 7)
    assert {path.name for path in tmp_path.iterdir() if not (path / "checkpoint.json").exists()} == {
        *("iter_notes", "iter_0000000", "latest")
    }


def test_a_run_that_went_back_keeps_what_it_writes_now(tmp_path):
    for iteration in (3, 6, 9):
        _save(checkpoint_directory(tmp_path, iteration))
    for iteration in (4, 5):  # continued from 3, because later ones were no good
        _save(checkpoint_directory(tmp_path, iteration), keep=Retention(2))
    assert _iterations(tmp_path) == [4, 5, 6, 9]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    _save(checkpoint_directory(tmp_path, 1))

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"iter_0000001 cannot be removed \(Permission denied\)"):
        _save(checkpoint_directory(tmp_path, 2), keep=Retention(1))
    assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, 2)
    monkeypatch.undo()
    _save(checkpoint_directory(tmp_path, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "iter_0000003", "latest"]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    for name in (".iter_0000001.tmp", ".iter_0000002.tmp", ".iter_0000004.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00007.bin").write_bytes(b"half")
    (tmp_path / ".iter_mine.tmp").mkdir()
    _save(checkpoint_directory(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".iter_mine.tmp", "iter_0000002", "latest"]
    assert sorted(path.name for path in (tmp_path / "iter_0000002").iterdir()) == ["checkpoint.json", "rank_00000.bin"]


def test_what_others_put_in_the_place_of_a_save_is_removed(tmp_path):
    root, own = tmp_path / "run", tmp_path / "own"
    for folder in (root, own):
        folder.mkdir()
    (own / "file").write_text("mine")
    for name in (".iter_0000001.tmp", ".iter_0000007.removed"):
        (root / name).symlink_to(own)
    (root / ".iter_0000002.tmp").symlink_to(tmp_path / "absent")
    for iteration in (1, 2):
        _save(checkpoint_directory(root, iteration))
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]
    assert [path.name for path in own.iterdir()] == ["file"]
    assert not (tmp_path / "absent").exists()


@contextmanager
def hold_folder(root: Path) -> Iterator[None]:
    key = acquire_folder(root)
    try:
        yield
    finally:
        release_folder(key)


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
    monkeypatch.setattr(folders, "_WAIT_S", 0.1)
    pid, connection, process = holder
    with pytest.raises(CheckpointError, match=rf"run is in use by process {pid} on \S+ since 20\S+; wait") as caught:
        acquire_folder(tmp_path / "run")
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
    monkeypatch.setattr(folders, "_WAIT_S", 0.1)
    for text in ("", "[]", '{"process": "x"}', "[" * 500):
        (tmp_path / "run" / LOCK_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="in use by another process"):
            acquire_folder(tmp_path / "run")
