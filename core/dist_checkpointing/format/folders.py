"""Names folders of checkpoints, points to the latest, and publishes a checkpoint atomically.

    root/
      iter_0000100/        checkpoint.json, rank_00000.bin, ...
      .iter_0000200.tmp/   being written: no program reads it
      latest               "iter_0000100"
      .lock                who writes here; `folder_lock`

A checkpoint is written in a temporary folder, forced to disk, renamed, and only then named in ``latest``: a crash at
any moment leaves the previous one whole and named. The lock lets one run at a time save into a root.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...files.bounds import BoundsError, brief, read_file
from ...files.durable import make_folders, sync_folder, write_durably
from .safe_metadata import INDEX_FILE, TORCH_INDEX_FILE

LATEST_FILE = "latest"
_POINTER_BYTES = 4096
_LONGEST_NAME = 128
"""Characters of a checkpoint's name; file systems take 255 bytes."""
_ITERATION = re.compile(r"iter_\d{7,}")
_LEFT_OVER = re.compile(r"\.iter_\d{7,}\.(tmp|removed|old)")


def checkpoint_directory(root: str | os.PathLike[str], iteration: int) -> Path:
    """Returns ``root/iter_0000100`` for iteration 100."""
    return Path(root) / f"iter_{iteration:07d}"


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Returns the folder that ``root/latest`` names; None if nothing was saved in `root`.

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
        raise CheckpointError(
            f"{pointer} holds {brief(name)}, which is no folder next to it; write a checkpoint's name there"
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
    """Returns `folder`, or the one that it was replacing if a crash fell between the two renames of :func:`publish`.

    After such a crash the new checkpoint is complete under its temporary name. Without it, the folder that was moved
    aside is left from a later crash, and its checkpoint has been removed since: then it is not returned.
    """
    return _aside(folder) if _was_being_replaced(folder) else folder


def begin(folder: Path) -> Path:
    """Makes the temporary folder that `folder` is written in; raises CheckpointError if `folder` has other
    contents."""
    if folder.exists() and not _is_replaceable(folder):
        raise CheckpointError(
            f"{folder} exists and is no checkpoint, so it is not replaced; save to another folder or move it away"
        )
    temporary = temporary_folder(folder)
    make_folders(folder.parent)
    _sweep(folder.parent)
    if temporary.exists():
        shutil.rmtree(temporary)  # left by a save that was killed; its name may be any
    temporary.mkdir()
    return temporary


def _sweep(root: Path) -> None:
    """Removes what killed saves and removals left in `root`; renames back a checkpoint that one was replacing.

    Only the holder of the folder's lock calls it, so that leftovers are always of programs that have ended.
    """
    for aside in root.glob(".iter_*.old"):
        folder = root / aside.name[1:].removesuffix(".old")
        if _LEFT_OVER.fullmatch(aside.name) and _was_being_replaced(folder):
            aside.rename(folder)
    for left in root.iterdir():
        if _LEFT_OVER.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


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
    """Also keep iterations that are multiples of this; None keeps no others."""


def prune(root: Path, keep: Retention, is_good: Callable[[Path], bool] = lambda _: True) -> None:
    """Removes the complete checkpoints ``root/iter_...`` that `keep` does not name. Call it once the new one is
    verified.

    Checkpoints of later iterations than ``latest``, which a run left before it was continued from an earlier one, are
    neither counted nor removed. If none of those that stay is good, the newest good one stays too. A checkpoint that
    cannot be removed is a warning. A removal begins with a rename, so that no partial checkpoint has a valid name.

    Args:
        is_good: returns whether the description of a checkpoint says that a run can continue from it.
    """
    named = complete_checkpoints(root)
    pointed = latest_checkpoint(root)
    until_now = named[named.index(pointed) :] if pointed in named else []
    doomed = [path for path in until_now[keep.last :] if keep.every is None or iteration_of(path) % keep.every != 0]
    if doomed and not any(is_good(path) for path in until_now if path not in doomed):
        spared = next((path for path in doomed if is_good(path)), None)
        doomed = [path for path in doomed if path != spared]
    for path in doomed:
        grave = path.with_name(f".{path.name}.removed")
        try:
            path.rename(grave)
            shutil.rmtree(grave)
        except OSError as error:
            warnings.warn(f"{path} cannot be removed ({error.strerror}); remove it by hand", stacklevel=2)


def complete_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders ``iter_...`` in `root` with a complete description, the highest iteration first."""
    found = [p for p in Path(root).glob("iter_*") if _ITERATION.fullmatch(p.name) and (p / INDEX_FILE).is_file()]
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(folder: Path) -> int:
    """Returns the iteration in the name of a checkpoint; -1 for other names."""
    return int(folder.name.removeprefix("iter_")) if _ITERATION.fullmatch(folder.name) else -1


def discard(folder: Path) -> None:
    """Removes the temporary folder of an unfinished save."""
    shutil.rmtree(temporary_folder(folder), ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _was_being_replaced(folder: Path) -> bool:
    """Returns whether a crash fell between the two renames of :func:`publish`."""
    complete = (_aside(folder) / INDEX_FILE).is_file() and (temporary_folder(folder) / INDEX_FILE).is_file()
    return complete and not folder.exists()


def _is_replaceable(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / INDEX_FILE).is_file() or (folder / TORCH_INDEX_FILE).is_file() or not any(folder.iterdir())
