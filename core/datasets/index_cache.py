"""Caches arrays on disk that are slow to compute. Safe when all ranks of a run start at once.

An entry is a folder named by the hash of its key, with one ``.npy`` per array and a ``description.json``. It is
written under a temporary name and renamed, so that a reader sees all of it or nothing. Readers memory-map it, so that
the ranks of a machine share one copy in memory. An entry that does not match its description (truncated, overwritten,
bits flipped) is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import DataError
from ..base.files import DISK_FULL, read_json

_DRAFT = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}(\.old)?")

Arrays = dict[str, NDArray[Any]]


def load_or_build(directory: Path, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays of `key`, memory-mapped. Calls `build` if the cache does not have them.

    If several processes of a machine call it at once, one builds and the others wait. On a file system without locks
    each builds, with the same result.

    Args:
        key: everything that the arrays depend on, as JSON values.

    Raises:
        DataError: the cache folder cannot be written.
    """
    text = json.dumps(key, sort_keys=True)
    entry = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
    arrays = _load(entry, text)
    if arrays is not None:
        return arrays
    with _one_at_a_time(directory) as locked:
        arrays = _load(entry, text)
        if arrays is None:
            built = build()
            try:
                if locked:
                    _sweep(directory)
                _store(entry, text, built)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise _unwritable(directory, error) from error
                warnings.warn(
                    f"{directory}: the order of samples is not kept ({error.strerror}), and is computed again by each "
                    "rank and each start; make room",
                    stacklevel=2,
                )
            arrays = _load(entry, text) or built
    return arrays


def _load(entry: Path, key: str) -> Arrays | None:
    try:
        description = read_json(entry / "description.json")
        if description["key"] != key:
            return None
        arrays: Arrays = {}
        for name, checksum in description["crc32"].items():
            arrays[name] = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if _crc32(arrays[name]) != checksum:
                return None
        return arrays
    except Exception:  # missing or damaged: JSON, numpy's header parser and mmap each raise other errors
        return None


def _store(entry: Path, key: str, arrays: Arrays) -> None:
    draft = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        for name, values in arrays.items():
            np.save(draft / f"{name}.npy", values, allow_pickle=False)
        description = {"key": key, "crc32": {name: _crc32(values) for name, values in arrays.items()}}
        (draft / "description.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):  # a damaged entry; processes that have it mapped keep their pages
            aside = draft.with_name(f"{draft.name}.old")
            entry.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            draft.rename(entry)
        except OSError:
            if not entry.exists():  # without locks another builder may have been faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _crc32(values: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B"))


def _sweep(directory: Path) -> None:
    """Removes drafts of killed programs. Only the holder of the lock writes, so that no other draft is in use."""
    for entry in directory.iterdir():
        if _DRAFT.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[bool]:
    """Holds a lock, which the kernel releases if the process dies. Yields False if the system has no locks."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("ab")
    except OSError as error:
        raise _unwritable(directory, error) from error
    with file:
        locked = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        yield locked


def _unwritable(directory: Path, error: OSError) -> DataError:
    return DataError(
        f"{directory}: the index cache cannot be written ({error.strerror}); make the folder writable, or choose "
        "another as cache_dir"
    )


def default_directory(prefix: str | os.PathLike[str]) -> Path:
    """Returns the default cache folder of a corpus, next to it."""
    return Path(f"{os.fspath(prefix)}.cache")
