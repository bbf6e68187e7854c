"""Continues a run after a lost rank: keeps copies of its state in memory after each step, and loads the newest."""

from __future__ import annotations

from pathlib import Path

from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.host_copies import HostCopies, newest_copy
from .checkpointing import load_checkpoint, run_state
from .config import PretrainConfig
from .launch.generations import copies_root, current_generation
from .state import TrainingState


def load_newest_copy(state: TrainingState, config: PretrainConfig) -> Path | None:
    """Continues `state` in place from the newest copy in memory. Collective.

    Returns:
        where it was, or None if there is none: at the start of a run, or under a launcher that keeps no survivors.
    """
    root = copies_root()
    if root is None:
        return None
    folder = Ranks().from_first(lambda: newest_copy(root))
    if folder is not None:
        load_checkpoint(state, config, folder)
    return folder


class StepCopies:
    """Copies a run's state to memory after each step. Does nothing under a launcher that keeps no survivors."""

    def __init__(self, state: TrainingState, config: PretrainConfig) -> None:
        self._state, self._config = state, config
        root, generation = copies_root(), current_generation()
        self._copies: HostCopies | None = None
        if root is not None and generation is not None:
            self._copies = HostCopies(root, generation.number, *run_state(state, config), state.iteration)

    @property
    def are_kept(self) -> bool:
        return self._copies is not None

    def start(self) -> None:
        """Begins to copy the state after a step."""
        if self._copies is not None:
            self._copies.start(*run_state(self._state, self._config), self._state.iteration)

    def wait(self) -> None:
        """Waits until the last copy is complete on this rank. A step calls it before its last collective."""
        if self._copies is not None:
            self._copies.wait()

    def __enter__(self) -> StepCopies:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._copies is not None:
            self._copies.close()
