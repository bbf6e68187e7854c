"""Folders of checkpoints: their names, the pointer to the latest, and the steps that make a checkpoint appear at once.

    root/
      iter_0000100/        checkpoint.json, rank_00000.bin, ...
      .iter_0000200.tmp/   being written: nobody reads it
      latest               "iter_0000100"

A checkpoint is written aside, forced to disk, renamed into place, and only then named in ``latest``: a crash at any
moment leaves the previous one whole and pointed at.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError
from .safe_metadata import INDEX_FILE, TORCH_INDEX_FILE

LATEST_FILE = "latest"
_ITERATION = re.compile(r"iter_\d{7,}")


def checkpoint_directory(root: str | os.PathLike[str], iteration: int) -> Path:
    """``root/iter_0000100`` for iteration 100."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The folder that ``root/latest`` names; None if nothing was saved in `root`.

    Without the pointer, which a crash within the very first save can leave out, the folder of the highest iteration.

    Raises:
        CheckpointError: the pointer names no checkpoint in `root`.
    """
    pointer = Path(root) / LATEST_FILE
    if not pointer.exists():
        folders = [p for p in Path(root).glob("iter_*") if _ITERATION.fullmatch(p.name) and (p / INDEX_FILE).is_file()]
        return max(folders, key=lambda folder: int(folder.name[len("iter_") :]), default=None)
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or name in (".", "..") or Path(name).name != name:
        raise CheckpointError(
            f"{pointer} holds {name!r}, which is no folder beside it; write a checkpoint's name there"
        )
    folder = Path(root) / name
    if not (existing_folder(folder) / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{pointer} names {name!r}, and {folder} is no complete checkpoint; write the name of another one there"
        )
    return folder


def existing_folder(folder: Path) -> Path:
    """`folder`, or the one that it was replacing when a crash fell between the two renames of :func:`publish`."""
    aside = _aside(folder)
    return aside if not folder.exists() and (aside / INDEX_FILE).is_file() else folder


def begin(folder: Path) -> Path:
    """Makes the empty folder in which `folder` is written; raises CheckpointError if `folder` holds something else."""
    if folder.exists() and not _is_replaceable(folder):
        raise CheckpointError(
            f"{folder} exists and is no checkpoint, so it is not replaced; save to another folder or move it away"
        )
    temporary = temporary_folder(folder)
    if temporary.exists():
        shutil.rmtree(temporary)  # of a save that was killed
    temporary.mkdir(parents=True)
    return temporary


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def publish(folder: Path) -> None:
    """Gives the complete temporary folder its name, in place of a checkpoint of that name, and points to it."""
    temporary, aside = temporary_folder(folder), _aside(folder)
    sync_folder(temporary)
    if folder.exists():
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    temporary.rename(folder)
    sync_folder(folder.parent)
    write_durably(folder.parent / LATEST_FILE, f"{folder.name}\n")
    shutil.rmtree(aside, ignore_errors=True)


def discard(folder: Path) -> None:
    """Removes what an unfinished save left."""
    shutil.rmtree(temporary_folder(folder), ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Replaces the file at once: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / INDEX_FILE).is_file() or (folder / TORCH_INDEX_FILE).is_file() or not any(folder.iterdir())
