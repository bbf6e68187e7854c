"""Allows one writer per folder: a lock that names its holder, and that the kernel releases when the holder dies.

A run holds the lock of its folder until it ends; a save outside of a run holds it while it writes. It is a POSIX
record lock on ``.lock`` in the folder: processes forked from the holder do not inherit it, and network file systems
share it between hosts. The file names the holder and is removed on release; a file that a crash left is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ...errors import CheckpointError
from ...files.durable import make_folders

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
_WAIT_S = 3.0
"""How long to wait for a holder that is just ending, such as ranks whose launcher was killed."""
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass
class _Held:
    """A lock of this process; closing `descriptor` releases it."""

    descriptor: int
    holders: int
    """Calls of `acquire_folder` that `release_folder` has not undone; the last release closes the descriptor."""


_held: dict[tuple[int, str], _Held] = {}
"""Locks by process and folder, because a fork inherits the entry but not the lock. `acquire_folder` adds and
`release_folder` removes, both under `_guard`."""
_guard = threading.Lock()
"""Held while `_held` is read or changed: an asynchronous save releases its lock on another thread."""


@contextlib.contextmanager
def hold_folder(root: Path) -> Iterator[None]:
    """Holds the lock of `root`, creating the folder if needed. One process may hold it several times.

    Raises:
        CheckpointError: another process holds it; names host, process and start.
        OSError: nothing can be written in `root`.
    """
    key = acquire_folder(root)
    try:
        yield
    finally:
        release_folder(key)


def acquire_folder(root: Path) -> tuple[int, str]:
    """Takes the lock as :func:`hold_folder` does; returns the key for :func:`release_folder`."""
    make_folders(root)
    key = os.getpid(), str(root.resolve())
    with _guard:
        if key in _held:
            _held[key].holders += 1
        else:
            _held[key] = _Held(_lock(root), 1)
    return key


def release_folder(key: tuple[int, str]) -> None:
    """Undoes one :func:`acquire_folder`; the last call releases the lock."""
    with _guard:
        held = _held[key]
        held.holders -= 1
        if held.holders == 0:
            del _held[key]
            with contextlib.suppress(OSError):
                (Path(key[1]) / LOCK_FILE).unlink()
            os.close(held.descriptor)


def _lock(root: Path) -> int:
    """Takes the lock, and returns the descriptor of the file that holds it."""
    path, deadline = root / LOCK_FILE, time.monotonic() + _WAIT_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if _try_lock(descriptor, root) and _is_at(descriptor, path):
                _describe_holder(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        holder = _holder(descriptor)
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{root} is in use by {holder}; wait until that has ended, or choose another folder to write to"
            )
        time.sleep(_POLL_S)


def _try_lock(descriptor: int, root: Path) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{root} is on a file system without locks: see to it that no other run writes there", stacklevel=4
        )
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the locked file still has its name; a holder that ended in between has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _describe_holder(descriptor: int) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": now})
    with contextlib.suppress(OSError):  # a full disk: the lock works without its description
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 1024, 0))
        return f"process {int(said['process'])} on {str(said['host'])[:64]} since {str(said['since'])[:32]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
