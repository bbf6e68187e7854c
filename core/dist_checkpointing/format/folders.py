"""Names and locks folders of checkpoints, points to the latest, and publishes a checkpoint atomically.

    root/
      iter_0000100/        checkpoint.json, rank_00000.bin, ...
      .iter_0000200.tmp/   being written: no program reads it
      latest               "iter_0000100"
      .lock                who writes here

A checkpoint is written in a temporary folder, forced to disk, renamed, and only then named in ``latest``: a crash at
any moment leaves the previous one whole and named. The lock lets one run at a time save into a root.

A run holds the lock of its folder until it ends; a save outside of a run holds it while it writes. It is a lock of
`filelock`, which the kernel releases when the holder dies. Processes forked from the holder do not keep it, and
network file systems share it between hosts. The file names the holder and is removed on release; a file that a crash
left is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import re
import shutil
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...base.errors import CheckpointError
from ...base.files import BoundsError, brief, make_folders, open_in_place, read_file, sync_folder, write_durably
from .index import INDEX_FILE, TORCH_INDEX_FILE

LOCK_FILE = ".lock"
_WAIT_S = 3.0
"""How long to wait for a holder that is just ending, such as ranks whose launcher was killed."""
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_STRICT: dict[str, Any] = {}
"""Keeps filelock 4 from a lock that a crash would leave behind, where the file system has no locks. Earlier versions
raise there."""
if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters:
    _STRICT["fallback_to_soft"] = False

_locks: dict[tuple[int, str], FileLock] = {}
"""Locks by process and folder, which count their holders. `acquire_folder` adds, under `_guard`. A fork inherits the
entries, and none of the locks."""
_guard = threading.Lock()
"""Held while a lock is taken or released: an asynchronous save releases its lock on another thread."""


def acquire_folder(root: Path) -> tuple[int, str]:
    """Takes the lock of `root`, creating the folder if needed. One process may hold it several times.

    Returns:
        the key for :func:`release_folder`.

    Raises:
        CheckpointError: another process holds it; names host, process and start.
        OSError: nothing can be written in `root`.
    """
    make_folders(root)
    key = os.getpid(), str(root.resolve())
    path = Path(key[1], LOCK_FILE)
    with _guard:
        lock = _locks.setdefault(key, FileLock(path, thread_local=False, **_STRICT))
        try:
            lock.acquire(timeout=_WAIT_S, poll_interval=_POLL_S)
        except Timeout:
            raise CheckpointError(
                f"{root} is in use by {_holder(path)}; wait until that has ended, or choose another folder to write to"
            ) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            warnings.warn(f"{root} is on a file system without locks: no other run may write there", stacklevel=3)
        if lock.lock_counter <= 1:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            holder = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": now})
            # A full disk: the lock works without its description.
            with contextlib.suppress(OSError), os.fdopen(open_in_place(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
                file.write(holder)
    return key


def release_folder(key: tuple[int, str]) -> None:
    """Undoes one :func:`acquire_folder`. The last call releases the lock."""
    with _guard:
        lock = _locks[key]
        if lock.lock_counter <= 1:
            with contextlib.suppress(OSError):
                Path(key[1], LOCK_FILE).unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        with path.open("rb") as file:
            holder = json.loads(file.read(1024))
        return f"process {int(holder['process'])} on {str(holder['host'])[:64]} since {str(holder['since'])[:32]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


LATEST_FILE = "latest"
_POINTER_BYTES = 4096
_LONGEST_NAME = 128
"""Characters of a checkpoint's name. File systems take 255 bytes."""
_ITERATION = re.compile(r"iter_\d{7,}")
_LEFT_OVER = re.compile(r"\.iter_\d{7,}\.(tmp|removed|old)")


def checkpoint_directory(root: str | os.PathLike[str], iteration: int) -> Path:
    """Returns ``root/iter_0000100`` for iteration 100."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Returns the folder that ``root/latest`` names, or None if nothing was saved in `root`.

    Without the pointer, which a crash during the very first save can leave out, returns the folder of the highest
    iteration.

    Raises:
        CheckpointError: the pointer names no checkpoint in `root`.
    """
    pointer = Path(root) / LATEST_FILE
    if not pointer.exists():
        return next(iter(complete_checkpoints(root)), None)
    try:
        name = read_file(pointer, _POINTER_BYTES).decode("utf-8", errors="replace").strip()
    except (OSError, BoundsError) as error:
        raise CheckpointError(
            f"{pointer} cannot be read ({error}); it is a file that holds the name of a checkpoint: write one there"
        ) from None
    if not name or name in (".", "..") or Path(name).name != name or len(name) > _LONGEST_NAME or "\0" in name:
        raise CheckpointError(f"{pointer} holds {brief(name)}, no folder next to it; write a checkpoint's name there")
    folder = Path(root) / name
    if not (existing_folder(folder) / INDEX_FILE).is_file():
        others = ", ".join(path.name for path in complete_checkpoints(root)[:5])
        raise CheckpointError(
            f"{pointer} names {name!r}, and {folder} is no complete checkpoint; write the name of another one there"
            f"{f' ({others})' if others else ''}"
        )
    return folder


def absolute_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the path from the root. Keeps links."""
    return Path(os.path.abspath(directory))  # noqa: PTH100  # resolve() would replace a link by its target


def existing_folder(folder: Path) -> Path:
    """Returns `folder`, or the one that it was replacing if a crash fell between the two renames of :func:`publish`.

    After such a crash the new checkpoint is complete under its temporary name. Without it, the folder that was moved
    aside is left from a later crash, and its checkpoint has been removed since: then it is not returned.
    """
    return _aside(folder) if _was_being_replaced(folder) else folder


@contextlib.contextmanager
def being_written(folder: Path) -> Iterator[None]:
    """Makes the temporary folder that `folder` is written in, and holds the lock of their root. Removes it after an
    error.

    Raises:
        CheckpointError: another process holds the lock, or `folder` has other contents.
    """
    key = acquire_folder(folder.parent)
    try:
        begin(folder)
        yield
    except BaseException:
        discard(folder)
        raise
    finally:
        release_folder(key)


def begin(folder: Path) -> None:
    """Makes the temporary folder that `folder` is written in. Raises CheckpointError if `folder` has other
    contents."""
    if folder.exists() and not _is_replaceable(folder):
        raise CheckpointError(
            f"{folder} exists and is no checkpoint, so it is not replaced; save to another folder or move it away"
        )
    temporary = temporary_folder(folder)
    make_folders(folder.parent)
    _sweep(folder.parent)
    _remove(temporary)  # left by a save that was killed; its name may be any
    temporary.mkdir()


def _sweep(root: Path) -> None:
    """Removes what killed saves and removals left in `root`. Renames back a checkpoint that one was replacing.

    Only the holder of the folder's lock calls it, so that leftovers are always of programs that have ended.
    """
    for aside in root.glob(".iter_*.old"):
        folder = root / aside.name[1:].removesuffix(".old")
        if _LEFT_OVER.fullmatch(aside.name) and _was_being_replaced(folder):
            aside.rename(folder)
    for entry in root.iterdir():
        if _LEFT_OVER.fullmatch(entry.name):
            _remove(entry)


def _remove(entry: Path) -> None:
    """Removes a folder, or what others have put in its place: a link, not what it leads to."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()


def temporary_folder(folder: Path) -> Path:
    return folder.absolute().with_name(f".{folder.absolute().name}.tmp")


def publish(folder: Path) -> None:
    """Renames the complete temporary folder, replacing a checkpoint of that name, and points ``latest`` to it."""
    temporary, aside = temporary_folder(folder), _aside(folder)
    sync_folder(temporary)
    if folder.exists():
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    try:
        temporary.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    sync_folder(folder.parent)
    write_durably(folder.parent / LATEST_FILE, f"{folder.name}\n")
    shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay when a new one is complete."""

    last: int
    """Number of the highest iterations to keep, at least one."""
    every: int | None = None
    """Also keep iterations that are multiples of this. None keeps no others."""


def prune(root: Path, keep: Retention, is_good: Callable[[Path], bool] = lambda _: True) -> None:
    """Removes the complete checkpoints ``root/iter_...`` that `keep` does not name. Call it once the new one is
    verified.

    Checkpoints of later iterations than ``latest``, which a run left before it was continued from an earlier one, are
    neither counted nor removed. If none of those that stay is good, the newest good one stays too. A checkpoint that
    cannot be removed is a warning. A removal begins with a rename, so that no partial checkpoint has a valid name.

    Args:
        is_good: returns whether the description of a checkpoint says that a run can continue from it.
    """
    checkpoints = complete_checkpoints(root)
    latest = latest_checkpoint(root)
    until_now = checkpoints[checkpoints.index(latest) :] if latest in checkpoints else []
    obsolete = [path for path in until_now[keep.last :] if keep.every is None or iteration_of(path) % keep.every != 0]
    if obsolete and not any(is_good(path) for path in until_now if path not in obsolete):
        newest_good = next((path for path in obsolete if is_good(path)), None)
        obsolete = [path for path in obsolete if path != newest_good]
    for path in obsolete:
        grave = path.with_name(f".{path.name}.removed")
        try:
            path.rename(grave)
            shutil.rmtree(grave)
        except OSError as error:
            warnings.warn(f"{path} cannot be removed ({error.strerror}); remove it by hand", stacklevel=2)


def complete_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders ``iter_...`` in `root` with a complete description, the highest iteration first."""
    complete = [p for p in Path(root).glob("iter_*") if _ITERATION.fullmatch(p.name) and (p / INDEX_FILE).is_file()]
    return sorted(complete, key=iteration_of, reverse=True)


def iteration_of(folder: Path) -> int:
    """Returns the iteration in the name of a checkpoint, or -1 for other names."""
    return int(folder.name.removeprefix("iter_")) if _ITERATION.fullmatch(folder.name) else -1


def discard(folder: Path) -> None:
    """Removes the temporary folder of an unfinished save."""
    _remove(temporary_folder(folder))


def _aside(folder: Path) -> Path:
    return folder.absolute().with_name(f".{folder.absolute().name}.old")


def _was_being_replaced(folder: Path) -> bool:
    """Returns whether a crash fell between the two renames of :func:`publish`."""
    complete = (_aside(folder) / INDEX_FILE).is_file() and (temporary_folder(folder) / INDEX_FILE).is_file()
    return complete and not folder.exists()


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / INDEX_FILE).is_file() or (folder / TORCH_INDEX_FILE).is_file() or not any(folder.iterdir())
