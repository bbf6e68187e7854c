"""Folders of checkpoints: their names, the pointer to the latest, and the steps that make a checkpoint appear at once.

    root/
      iter_0000100/        checkpoint.json, rank_00000.bin, ...
      .iter_0000200.tmp/   being written: nobody reads it
      latest               "iter_0000100"

A checkpoint is written aside, forced to disk, renamed into place, and only then named in ``latest``: a crash at any
moment leaves the previous one whole and pointed at. One run saves into a root at a time.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .safe_metadata import INDEX_FILE, TORCH_INDEX_FILE

LATEST_FILE = "latest"
_ITERATION = re.compile(r"iter_\d{7,}")
_LEFT_OVER = re.compile(r"\.iter_\d{7,}\.(tmp|removed)")


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
        return next(iter(complete_checkpoints(root)), None)
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or name in (".", "..") or Path(name).name != name:
        raise CheckpointError(
            f"{pointer} holds {name!r}, which is no folder beside it; write a checkpoint's name there"
        )
    folder = Path(root) / name
    if not (existing_folder(folder) / INDEX_FILE).is_file():
        others = ", ".join(path.name for path in complete_checkpoints(root)[:5])
        raise CheckpointError(
            f"{pointer} names {name!r}, and {folder} is no complete checkpoint; write the name of another one there"
            f"{f' ({others})' if others else ''}"
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
    for left in temporary.parent.iterdir():  # by saves of other iterations, or a removal, that were killed
        if left != temporary and _LEFT_OVER.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
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


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay when a new one stands."""

    last: int
    """So many of the highest iterations, at least one."""
    every: int | None = None
    """And those whose iteration is a multiple of this."""


def prune(root: Path, keep: Retention) -> None:
    """Removes the complete checkpoints ``root/iter_...`` that `keep` does not name.

    Those of later iterations than the one that ``latest`` names, from before a run was continued from an earlier one,
    are neither counted nor removed. One that cannot be removed is a warning, because the new one stands. A
    removal begins by taking the name away, so that no half of a checkpoint is ever found under it.
    """
    named = complete_checkpoints(root)
    pointed = latest_checkpoint(root)
    until_now = named[named.index(pointed) :] if pointed in named else []
    doomed = [path for path in until_now[keep.last :] if keep.every is None or _iteration(path) % keep.every != 0]
    for path in doomed:
        grave = path.with_name(f".{path.name}.removed")
        try:
            path.rename(grave)
            shutil.rmtree(grave)
        except OSError as error:
            warnings.warn(f"{path} cannot be removed ({error.strerror}); remove it by hand", stacklevel=2)


def complete_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """The folders ``iter_...`` in `root` that hold a whole description, the highest iteration first."""
    found = [p for p in Path(root).glob("iter_*") if _ITERATION.fullmatch(p.name) and (p / INDEX_FILE).is_file()]
    return sorted(found, key=_iteration, reverse=True)


def _iteration(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


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
