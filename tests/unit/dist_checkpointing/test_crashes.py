"""Killed before any of its file operations, a save leaves a checkpoint that loads, and the next save succeeds."""

import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import Retention, checkpoint_directory, latest_checkpoint, load, save, verify
from core.dist_checkpointing.format import folders

_WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value), "step": torch.tensor(int(value))}


def in_child(run) -> int:
    """Runs `run` in a fork; its exit status, minus a signal's number if one ended it."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saving_killed_at(operation: int, root: Path, iteration: int):
    """Saves in a process that is killed just before its n-th operation on files."""

    def run() -> None:
        count = 0

        def hook(event: str, args: tuple) -> None:
            nonlocal count
            opens_to_write = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if (opens_to_write or event in _WRITES) and str(root) in str(args[0]):
                count += 1
                if count == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save(state(iteration), checkpoint_directory(root, iteration), metadata={"n": iteration}, keep=Retention(2))

    return run


@pytest.mark.parametrize("iteration", [1, 3], ids=["in place of one", "in addition to two"])
def test_killed_at_any_operation_a_whole_checkpoint_is_left(tmp_path, iteration):
    operation, survived = 0, False
    seen = set()
    while not survived:
        operation += 1
        root = tmp_path / str(operation)
        for before in (0, 1):
            save(state(before), checkpoint_directory(root, before), metadata={"n": before})
        survived = in_child(saving_killed_at(operation, root, iteration)) == 0
        latest = latest_checkpoint(root)
        read = state(-1)
        number = load(read, latest, verify=True)["n"]
        assert number in (1, iteration)
        assert int(read["step"]) == number and read["w"].unique().tolist() == [number]
        seen.add((number, latest.exists()))
        save(state(4), checkpoint_directory(root, 4), metadata={"n": 4}, keep=Retention(2))
        assert load(read, latest_checkpoint(root), verify=True) == {"n": 4}
        assert not [path.name for path in root.iterdir() if path.name.endswith((".tmp", ".removed"))]
        for path in folders.complete_checkpoints(root):
            verify(path)
        assert operation < 100
    assert operation > 8  # opens, renames and removals were met
    if iteration == 1:
        assert (1, False) in seen  # between the two renames of a replacement


def test_all_is_forced_to_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        done.append("sync " + str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    save(state(1), checkpoint_directory(tmp_path, 1), metadata={})
    temporary = tmp_path / ".iter_0000001.tmp"
    assert done == [
        f"sync {temporary}/rank_00000.bin",
        f"sync {temporary}/.checkpoint.json.tmp",
        f"sync {temporary}",
        f"sync {temporary}",
        f"rename {temporary}",
        f"sync {tmp_path}",
        f"sync {tmp_path}/.latest.tmp",
        f"sync {tmp_path}",
    ]


def _save_with_little_room(root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))  # in the middle of `w`
    with pytest.raises(CheckpointError, match=r"iter_0000002.*File too large"):
        save(state(2), checkpoint_directory(root, 2), metadata={})


def test_when_the_disk_is_full_the_last_checkpoint_remains(tmp_path):
    save(state(1), checkpoint_directory(tmp_path, 1), metadata={"n": 1})
    assert in_child(lambda: _save_with_little_room(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest"]
    assert load(state(0), latest_checkpoint(tmp_path), verify=True) == {"n": 1}


def test_a_full_disk_is_reported_with_the_systems_message(tmp_path, monkeypatch):
    save(state(1), checkpoint_directory(tmp_path, 1), metadata={"n": 1})
    opened = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", **options):
        is_new = path.name == "rank_00000.bin" and mode == "xb"
        return opened(Path("/dev/full"), "wb") if is_new else opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(state(2), checkpoint_directory(tmp_path, 2), metadata={})
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest"]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match=r"/proc/self/run/it.*(No such file|denied|not permitted)"):
        save(state(1), "/proc/self/run/it", metadata={})

    def as_unprivileged_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(state(2), checkpoint_directory(tmp_path / "run", 2), metadata={})
        assert load(state(0), latest_checkpoint(tmp_path / "run")) == {"n": 1}

    save(state(1), checkpoint_directory(tmp_path / "run", 1), metadata={"n": 1})
    (tmp_path / "run").chmod(0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(tmp_path.parents[-3]) and folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    assert in_child(as_unprivileged_user if os.getuid() == 0 else lambda: None) == 0
    assert latest_checkpoint(tmp_path / "run").name == "iter_0000001"


def test_a_link_in_a_new_checkpoint_is_not_written_through(tmp_path, monkeypatch):
    begin, own = folders.begin, tmp_path / "own"
    own.write_text("mine")

    def begin_where_others_write(folder: Path) -> None:
        begin(folder)
        (folders.temporary_folder(folder) / "rank_00000.bin").symlink_to(own)

    monkeypatch.setattr(folders, "begin", begin_where_others_write)
    with pytest.raises(CheckpointError, match="File exists"):
        save(state(1), checkpoint_directory(tmp_path / "run", 1), metadata={})
    assert own.read_text() == "mine"
