"""Writes checkpoints in the background: training waits only until the tensors that it changes are copied."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import device
from ..comm.by_backend import all_reduce_by_backend
from .format.folders import Retention
from .format.staging import HostStaging
from .serialization import save

_GROUP_LIMIT = timedelta(hours=6)
"""How long ranks that have written wait for one that still writes. A rank that has ended is noticed at once."""


class AsyncSaver:
    """Writes one checkpoint at a time in the background, on a gloo group of its own; collective over all ranks.

    Each rank copies its part of the checkpoint into host memory of the same size, which it keeps for the next one. A
    thread writes the copies as `save` does: the checkpoint is published atomically, and if a rank dies earlier, the
    last checkpoint stays. At the first checkpoint, and after the layout of the state has changed, training also waits
    until the ranks have planned which rank writes which piece. Call `wait` before the process group is destroyed.
    """

    def __init__(self) -> None:
        # The gloo group of the thread's collectives. The first `save` makes it; never cleared.
        self._group: dist.ProcessGroup | None = None
        # Owns the host copies that the thread writes. The next `save` overwrites them, after `wait`.
        self._staging = HostStaging()
        # The thread that writes the last checkpoint. `save` starts it, `wait` joins and clears it.
        self._thread: threading.Thread | None = None
        # The error of the last checkpoint on this rank. The thread sets it, `wait` raises and clears it.
        self._error: BaseException | None = None

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any],
        keep: Retention | None = None,
    ) -> None:
        """Begins a checkpoint, and returns when `state` may change; takes the arguments of `save`.

        Waits first for the previous checkpoint. Errors of this one are raised by `wait`, on all ranks.

        Raises:
            CheckpointError: as `wait` does, for the previous checkpoint.
        """
        self.wait()
        if self._group is None and dist.is_available() and dist.is_initialized():
            device.set_backend_defaults()  # the maker of the default group may not have asked for it
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_LIMIT)
        state = dict(state)  # the caller may change the mapping as soon as this returns, as it may the values
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
        """Whether this rank knows that the checkpoint could not be written. Other ranks may learn it later."""
        return self._error is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until the checkpoint is written, or for `limit_s` seconds.

        Raises:
            CheckpointError: the checkpoint could not be written; raised once, on all ranks.
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
        all_reduce_by_backend(all_know, self._group, what="whether all ranks know", op=dist.ReduceOp.MIN)
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
