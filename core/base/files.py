"""Reads untrusted files within limits, and writes files that survive a crash.

The memory and nesting that a file may require are bounded before a reader allocates anything. Every reader of foreign
files does so: counts must fit the file's size, nothing is nested deeper than `MAX_DEPTH`, and a file larger than its
kind allows is not read. A reader then needs at most `MEMORY_MULTIPLE` times the file's size, which ``make fuzz-files``
measures.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Most nested lists. Files of this and related libraries have fewer than ten."""

MAX_DIGITS = 32
"""Most digits of an integer in JSON."""

MEMORY_MULTIPLE = 128
"""Most bytes of memory per byte of a file, above `MEMORY_BASE_BYTES`: small Python objects are that much larger."""

MEMORY_BASE_BYTES = 64 << 20

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)

JSON_BYTES = 512 << 20
"""Largest description of a checkpoint. One of 100,000 tensors in ten pieces each takes some 100 MB."""

CONFIG_BYTES = 16 << 20
"""Largest settings file."""

TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer file. Published ones have up to 40 MB."""


class BoundsError(ValueError):
    """A file requires more than its size or kind allows. Readers raise an error that names the file."""


def read_file(path: Path, limit_bytes: int, *, follow_link: bool = True) -> bytes:
    """Reads a regular file.

    Args:
        follow_link: False: `path` itself must not be a link.

    Raises:
        BoundsError: it is larger than `limit_bytes`, or no regular file (a pipe, a device), whose size is unknown.
        OSError: it cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a program that writes into it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (0 if follow_link else _NO_LINK)
    with os.fdopen(os.open(path, flags), "rb") as stream:
        state = os.fstat(stream.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise BoundsError("it is no regular file")
        if state.st_size > limit_bytes:
            raise BoundsError(f"it has {state.st_size} bytes, and no file of this kind has more than {limit_bytes}")
        return stream.read(limit_bytes + 1)[:limit_bytes]


def read_json(path: Path, limit_bytes: int = CONFIG_BYTES) -> Any:
    """Reads a JSON file.

    Raises:
        BoundsError: as :func:`read_file` and :func:`parse_json`, and for text that is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        text = read_file(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BoundsError(f"it is no UTF-8 text ({error.reason} at byte {error.start})") from None
    return parse_json(text)


def parse_json(text: str, **options: Any) -> Any:
    """Parses a JSON text.

    Args:
        options: of `json.loads`. A hook may raise ValueError.

    Raises:
        BoundsError: the text is not JSON, is nested too deep, or has a number of too many digits.
    """
    try:
        value = json.loads(text, parse_int=_integer, **options)
    except RecursionError:
        raise BoundsError(f"not valid JSON: it is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise BoundsError(f"not valid JSON ({error})") from None
    if _is_deep(value):
        raise BoundsError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def brief(value: Any) -> str:
    """Formats a value read from a file for a message: shortened if long or deep."""
    return _SHORT.repr(value)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BoundsError(f"a number of {len(text)} digits")
    return int(text)


def _is_deep(value: Any) -> bool:
    """Returns whether lists and tables in a JSON value are nested too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
            if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that may be temporary."""


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically: after a crash it has the old text or the new.

    The temporary file has one name, so that a crash leaves one at most. It is made anew: others who may write into
    the folder can put a link there, which would be written through.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def open_in_place(path: Path, flags: int) -> int:
    """Opens a file of a fixed name, for ``os.fdopen``: never through a link, nor waiting at a pipe.

    Raises:
        OSError: it is a link, or a pipe that no program reads.
    """
    return os.open(path, flags | _NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o666)


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Makes `folder` with its parents, and forces the name of each new one to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
