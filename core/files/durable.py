"""Writes files that survive a crash: forces contents and folders to disk before renaming."""

from __future__ import annotations

import errno
import os
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that may be temporary."""


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically: after a crash it has the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Forces a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to disk."""
    sync_file(folder)


def make_folders(folder: Path) -> None:
    """Makes `folder` with its parents, and forces the name of each new one to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
