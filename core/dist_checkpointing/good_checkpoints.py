"""Finds the checkpoint that a run continues from, and offers an undamaged one where another is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..base.errors import CheckpointError
from .agreement import Ranks
from .format import folders
from .format.index import INDEX_FILE
from .format.reader import is_good
from .loading import damage


def find_checkpoint(root: Path, *, fall_back: bool = False) -> Path:
    """Returns the latest checkpoint of a run's folder, or the folder itself if it is a checkpoint.

    Args:
        fall_back: if ``latest`` names none, take the one of the highest iteration.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(root):
        return root
    try:
        checkpoint = folders.latest_checkpoint(root) if root.is_dir() else None
    except CheckpointError:
        checkpoint = next(iter(folders.complete_checkpoints(root)), None) if fall_back else None
        if checkpoint is None:
            raise
    if checkpoint is None:
        found = "holds no checkpoint" if root.is_dir() else "no such folder"
        raise CheckpointError(f"{root}: {found}; give the folder of a run, or of a checkpoint")
    return checkpoint


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is one checkpoint, not the folder of a run."""
    return (folder / INDEX_FILE).is_file()


def newest_good(root: Path, ranks: Ranks, *, exclude: Path | None = None) -> Path | None:
    """Returns the newest undamaged checkpoint that a run can continue from, or None if there is none. Collective.

    Args:
        exclude: a checkpoint that is not considered; older ones are tried first, then newer ones.
    """
    paths = ranks.from_first(lambda: [path for path in folders.complete_checkpoints(root) if path != exclude])
    if exclude is not None:
        paths.sort(key=lambda path: folders.iteration_of(path) > folders.iteration_of(exclude))
    for path in paths:
        if ranks.from_first(partial(is_good, path)) and not damage(path, ranks):
            return path
    return None


@contextmanager
def another_offered(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Adds to errors of a checkpoint with damaged files the newest undamaged one to load instead. Collective."""
    try:
        yield
    except CheckpointError as error:
        if folder.parent == folder or not damage(folder, ranks):
            raise
        raise CheckpointError(f"{error}; {advice(folder, ranks)}") from None


def advice(folder: Path, ranks: Ranks) -> str:
    """Says which checkpoint to load instead of `folder`. Collective."""
    good_folder = newest_good(folder.parent, ranks, exclude=folder)
    if good_folder is None:
        return f"no other checkpoint in {folder.parent} is whole"
    return f"{good_folder.name} in the same folder is whole: continue from it with --load {good_folder}"
