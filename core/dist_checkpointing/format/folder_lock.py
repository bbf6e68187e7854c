"""Allows one writer per folder: a lock that names its holder, and that the kernel releases when the holder dies.

A run holds the lock of its folder until it ends; a save outside of a run holds it while it writes. It is a lock of
`filelock` on ``.lock`` in the folder: processes forked from the holder do not keep it, and network file systems share
it between hosts. The file names the holder and is removed on release; a file that a crash left is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...errors import CheckpointError
from ...files.durable import make_folders

LOCK_FILE = ".lock"
_WAIT_S = 3.0
"""How long to wait for a holder that is just ending, such as ranks whose launcher was killed."""
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_STRICT: dict[str, Any] = {}
"""Keeps filelock 4 from a lock that a crash would leave behind, where the file system has no locks; earlier ones raise
there."""
if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters:
    _STRICT["fallback_to_soft"] = False

_locks: dict[tuple[int, str], FileLock] = {}
"""Locks by process and folder, which count their holders. `acquire_folder` adds, under `_guard`; a fork inherits the
entries, and none of the locks."""
_guard = threading.Lock()
"""Held while a lock is taken or released: an asynchronous save releases its lock on another thread."""


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
            warnings.warn(
                f"{root} is on a file system without locks: make sure that no other run writes there", stacklevel=3
            )
        if lock.lock_counter <= 1:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            with contextlib.suppress(OSError):  # a full disk: the lock works without its description
                path.write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": now}))
    return key


def release_folder(key: tuple[int, str]) -> None:
    """Undoes one :func:`acquire_folder`; the last call releases the lock."""
    with _guard:
        lock = _locks[key]
        if lock.lock_counter <= 1:
            with contextlib.suppress(OSError):
                Path(key[1], LOCK_FILE).unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(1024))
        return f"process {int(said['process'])} on {str(said['host'])[:64]} since {str(said['since'])[:32]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
