"""Writes a run's checkpoints as its settings say: before training goes on, or in the background."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ...comm.record import recorded
from ...dist_checkpointing import AsyncSaver
from ...errors import CheckpointError, ShardstackError
from ..config import PretrainConfig
from ..state import TrainingState
from .run_checkpoint import save_checkpoint

_LAST_WAIT_S = 60.0


class CheckpointWriter:
    """Saves checkpoints of a run. Every rank enters it; leaving it waits for the checkpoint that is being written."""

    def __init__(self, config: PretrainConfig, folder: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._saver = AsyncSaver() if config.checkpoint.async_save and folder is not None else None
        self.written: Path | None = None
        """Folder of the last checkpoint that was begun; it may still be written, or have failed. `save` sets it; None
        before the first."""

    def save(self, state: TrainingState) -> str:
        """Saves a checkpoint, or begins to, and returns a line about it.

        Raises:
            CheckpointError: on all ranks: this checkpoint failed, or the previous one, written in the background.
            OutOfStepError: another rank did not answer.
        """
        if self._folder is None:
            raise CheckpointError("there is no folder to save to; add --save FOLDER")
        started = time.perf_counter()
        with recorded("save", "the run's checkpoint", 0):
            self.written = save_checkpoint(state, self._config, self._folder, saver=self._saver)
        seconds = time.perf_counter() - started
        if self._saver is None:
            return f"saved {self.written} in {seconds:.1f} s"
        return f"saving {self.written} while training went on, which waited {seconds:.2f} s"

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a failure, which `finish` will raise on all ranks."""
        return self._saver is not None and self._saver.failed

    def finish(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the last checkpoint; after an error that all ranks raise, for a limited time; after a crash,
        not."""
        if self._saver is None or (error is not None and not isinstance(error, ShardstackError)):
            return
        if error is None:
            self._saver.wait()
            return
        with suppress(CheckpointError):  # the error that left the block came first
            self._saver.wait(_LAST_WAIT_S)
