"""Writes checkpoints in the background: training waits only until what it will change has been copied."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .format.folders import Retention
from .format.staging import HostStaging
from .serialization import save

_GROUP_LIMIT = timedelta(hours=6)
"""How long ranks that have written wait for one that still writes; a rank that ends is noticed at once."""


class AsyncSaver:
    """Writes one checkpoint at a time in the background, on a gloo group of its own; collective over all ranks.

    Each rank copies what it will write into host memory, which it keeps, as large as its part of a checkpoint. A
    thread of it does the rest, as `save` does: what appears, appears at once, and a rank that ends before then leaves
    the last checkpoint as it was. The first time, and when the state is cut otherwise than the last time, training
    also waits until the ranks have planned who writes what. Call `wait` before the process group is taken down.
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_LIMIT) if joined else None
        self._staging = HostStaging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any],
        keep: Retention | None = None,
    ) -> None:
        """Begins a checkpoint, and returns when `state` may change; arguments are those of `core`'s `save`.

        Waits first for the one before it. What fails from here on is raised by `wait`, on all ranks.

        Raises:
            CheckpointError: as `wait` does, for the checkpoint before.
        """
        self.wait()
        state = dict(state)  # as the values, what is in it may change as soon as this returns
        self._staging.begin(state, self._agree)
        arguments = {
            "metadata": copy.deepcopy(dict(metadata)) if isinstance(metadata, Mapping) else metadata,
            "keep": keep,
            "staging": self._staging,
            "process_group": self._group,
        }
        self._thread = threading.Thread(
            target=self._write, args=(state, directory, arguments), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._staging.done.wait()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the checkpoint could not be written; others may know it a moment later."""
        return self._error is not None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        """Returns when nothing is being written any more, or after `limit_s` seconds.

        Raises:
            CheckpointError: the checkpoint could not be written; once, and on all ranks.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _agree(self, known: bool) -> bool:
        if self._group is None:
            return known
        all_know = torch.tensor(int(known))
        dist.all_reduce(all_know, dist.ReduceOp.MIN, group=self._group)
        return bool(all_know)

    def _write(
        self, state: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], arguments: dict[str, Any]
    ) -> None:
        try:
            save(state, directory, **arguments)
        except BaseException as error:  # raised in the thread that asked for it
            self._error = error
        finally:
            self._staging.done.set()
