"""Makes a launcher's folder in memory for copies of ranks' state, and removes the folders of killed launchers.

Whoever holds the lock of a folder owns it: its launcher, or one that removes it. The lock ends with its holder. A
launcher that makes a folder and one that sweeps cannot both have it, and the loser takes its hands off: a launcher
makes another folder then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...base.errors import ConfigError
from ...base.files import open_in_place
from .generations import COPIES_FOLDER

_MEMORY, _PREFIX = Path("/dev/shm"), "shardstack-copies-"
_ATTEMPTS = 16
"""To make a folder that no other launcher sweeps in the moment before it is locked."""


@contextmanager
def memory_for_copies(*, is_needed: bool) -> Iterator[dict[str, str]]:
    """Makes a folder in memory for copies of the ranks' state, and removes it at the end.

    Returns:
        the environment variable that names it to ranks. It is empty if no folder is needed, in the place of that of
        a launcher that this one runs under.

    Raises:
        ConfigError: there is no file system in memory, or it is full.
    """
    if not is_needed:
        yield {COPIES_FOLDER: ""}
        return
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        if (lock := _locked(folder)) is not None:
            _remove(folder, lock)
    lock = None
    with suppress(OSError):
        for _ in range(_ATTEMPTS):
            own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY))
            if (lock := _locked(own)) is not None:
                break
    if lock is None:
        raise ConfigError(f"--on-lost-rank keeps copies in {_MEMORY}, where no folder can be made; use restart")
    try:
        yield {COPIES_FOLDER: str(own)}
    finally:
        _remove(own, lock)


def _locked(folder: Path) -> int | None:
    """Returns the open lock of a folder of this user, or None if another process holds it, or it is not ours."""
    with suppress(OSError):
        descriptor = open_in_place(folder, os.O_RDONLY | os.O_DIRECTORY)
        held = os.fstat(descriptor)
        with suppress(OSError):
            if held.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(held, folder.lstat()):  # not one that a sweeper has removed since it was opened
                    return descriptor
        os.close(descriptor)
    return None


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
