"""Continues a run after a lost rank: keeps copies of its state in memory, and loads the newest.

For a loop of your own, inside `generations`:

    step = (load_newest(state()[0]) or {"step": 0})["step"]
    with StepCopies(state, step) as copies:           # state() returns tensors by name, and metadata with the step
        while step < last:
            ...                                       # forward, backward, reduction of gradients
            copies.wait()                             # before the update, which changes what is copied
            optimizer.step()
            step += 1
            copies.start(step)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import CheckpointError
from ..base.text import join_parts
from ..dist_checkpointing.host_copies import HostCopies, fetch_newest
from ..dist_checkpointing.loading import load
from .checkpointing import load_checkpoint, run_state
from .config import PretrainConfig
from .launch.generations import copies_root, current_generation
from .state import TrainingState


def load_newest_copy(state: TrainingState, config: PretrainConfig) -> Path | None:
    """Continues `state` in place from the newest copy in memory. Collective. Warns as `load_newest`.

    Returns:
        where it was, or None if there is none: at the start of a run, or under a launcher that keeps no survivors.
    """
    if (folder := _newest(lambda: run_state(state, config)[0])) is not None:
        load_checkpoint(state, config, folder, same_on_all=False)
    return folder


def load_newest(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Fills tensors in place from the newest copy in memory, whatever ranks and layout wrote it. Collective.

    Warns of damaged copies, and if none is complete after ranks were lost: then the last checkpoint is the newest.

    Returns:
        its metadata, or None if there is none: at the start of a run, or under a launcher that keeps no survivors.
    """
    folder = _newest(lambda: tensors)
    return None if folder is None else load(tensors, folder)


def _newest(targets: Callable[[], Mapping[str, Tensor]]) -> Path | None:
    root, generation = copies_root(), current_generation()
    if root is None or generation is None:
        return None
    folder, unread = fetch_newest(root, targets, generation.node)
    if unread and generation.rank == 0:
        warnings.warn(
            f"copies in memory are damaged or do not fit, and not used: {join_parts(unread, 5)}", stacklevel=3
        )
    if folder is None and generation.number > 0 and generation.rank == 0:
        what = "no complete copy is left in memory; continuing from the last checkpoint, or else from the start"
        warnings.warn(f"{generation.lost or 'all ranks start again'}: {what}", stacklevel=3)
    return folder


class StepCopies(AbstractContextManager["StepCopies"]):
    """Copies a run's state to memory after each step. Does nothing under a launcher that keeps no survivors.

    A copy that a rank cannot write is skipped, with a warning. Warns if the memory is too small for the copies of the
    ranks that go on after a loss, and copies nothing then.

    Args:
        state: returns what `save` takes: tensors by name, the same at each call, and metadata.
        step: number of the last step; its state is copied at once.
        interval: copies the state after each step that is a multiple of it.

    Raises:
        CheckpointError: on all ranks: the memory is too small at the start of the run, or `state` cannot be saved.
    """

    def __init__(
        self, state: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]], step: int, interval: int = 1
    ) -> None:
        self._state, self._interval = state, interval
        root, generation = copies_root(), current_generation()
        # None: there is nowhere to copy to.
        self._copies: HostCopies | None = None
        if root is None or generation is None:
            return
        try:
            self._copies = HostCopies(root, generation.number, *state(), step, generation.node)
        except CheckpointError as error:
            if generation.number == 0:
                raise
            if generation.rank == 0:
                what = "the run goes on without new copies: a loss goes back to the last one, or to a checkpoint"
                warnings.warn(f"{error}; {what}", stacklevel=2)

    def is_due(self, step: int) -> bool:
        """Returns whether the state after a step is copied."""
        return self._copies is not None and step % self._interval == 0

    def start(self, step: int) -> None:
        """Begins to copy the state after a step, if that is due."""
        if self._copies is not None and self.is_due(step):
            self._copies.start(*self._state(), step)

    def wait(self) -> None:
        """Waits until the last copy has ended on all ranks. A step calls it before its update."""
        if self._copies is not None:
            self._copies.wait()

    def __exit__(self, *_: object) -> None:
        if self._copies is not None:
            self._copies.close()
