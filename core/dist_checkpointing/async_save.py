"""Writes checkpoints in the background: training waits only until its tensors are copied to the host.

`HostStaging` copies a rank's part of a checkpoint, `AsyncSaver` writes the copies on a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import device
from ..base.errors import CheckpointError
from ..base.host_memory import host_pages
from ..comm import streams
from ..comm.collectives import all_reduce_by_backend
from .agreement import Ranks
from .format.folders import Retention
from .format.writer import Key, Offer, RawWriter, held_pieces, offers, spread
from .serialization import absolute_folder, planned_pieces, unsavable, write_pieces

_ALIGNMENT_BYTES = 64


class HostStaging:
    """Host memory for copies, allocated by the first checkpoint and reused by later ones.

    It is as large as this rank's part of a checkpoint, and pinned if copies come from a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        """Owns the copies of the last checkpoint. `copy` grows it, and overwrites it for the next one."""

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns contiguous copies on the host, complete when it returns. Overwrites those of the last call."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(streams.is_asynchronous(tensor.device) for tensor in tensors)
        if len(self._memory) < end or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before the larger one is allocated
            self._memory = streams.pinned([end], torch.uint8) if on_gpu else host_pages(end)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            copy = self._memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=on_gpu))
        if on_gpu:
            streams.current_stream().synchronize()
        return copies


_GROUP_LIMIT = timedelta(hours=6)
"""How long ranks that have written wait for one that still writes. A rank that has ended is noticed at once."""


class AsyncSaver:
    """Writes one checkpoint at a time in the background, on a gloo group of its own. Collective over all ranks.

    Each rank copies its part of the checkpoint into host memory of the same size, which it keeps for the next one. A
    thread writes the copies as `save` does: the checkpoint is published atomically, and if a rank dies earlier, the
    last checkpoint stays. Which rank writes which piece is planned at the first checkpoint, and again after the layout
    of the state has changed on a rank. Call `wait` before the process group is destroyed.
    """

    def __init__(self) -> None:
        # The gloo group of the thread's collectives. The first `save` makes it; never cleared.
        self._group: dist.ProcessGroup | None = None
        # Owns the host copies that the thread writes. The next `save` overwrites them, after `wait`.
        self._staging = HostStaging()
        # What this rank held at the last plan, and the pieces that it writes of it; empty before. `_plan` sets both.
        self._offered: dict[str, Offer] = {}
        self._keys: list[Key] = []
        # The thread that writes the last checkpoint. `save` starts it, `wait` joins and clears it.
        self._thread: threading.Thread | None = None
        # The error of the last checkpoint on this rank. `save` or the thread sets it, `wait` raises and clears it.
        self._error: BaseException | None = None

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any],
        keep: Retention | None = None,
    ) -> None:
        """Begins a checkpoint, and returns when `state` may change. Takes the arguments of `save`.

        Waits first for the previous checkpoint. Errors of this one are raised by `wait`, on all ranks.

        Raises:
            CheckpointError: as `wait` does, for the previous checkpoint.
        """
        self.wait()
        if self._group is None and dist.is_available() and dist.is_initialized():
            device.set_backend_defaults()  # the maker of the default group may not have asked for it
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_LIMIT)
        ranks, folder = Ranks(self._group), absolute_folder(directory)
        try:
            self._plan(state, metadata, folder, ranks)
            held = held_pieces(state)
            copies = self._staging.copy([held[key] for key in self._keys])
            writer = RawWriter(folder, metadata, keep)
        except CheckpointError as error:
            self._error = error
            return
        self._thread = threading.Thread(
            target=self._write, args=(copies, writer, ranks), name="checkpoint", daemon=True
        )
        self._thread.start()

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

    def _plan(self, state: Mapping[str, Tensor], metadata: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
        """Plans the pieces of `state`, unless no rank's layout has changed since the last plan."""
        offered = {} if unsavable(state, metadata) else offers(state)
        known = torch.tensor(int(offered == self._offered != {}))
        if self._group is not None:
            all_reduce_by_backend(known, self._group, what="whether all ranks know", op=dist.ReduceOp.MIN)
        if not known:
            self._keys = planned_pieces(state, metadata, folder, ranks, spread)
            self._offered = offered

    def _write(self, copies: list[Tensor], writer: RawWriter, ranks: Ranks) -> None:
        try:
            write_pieces(self._offered, self._keys, copies, writer, ranks)
        except BaseException as error:  # raised in the thread that asked for it
            self._error = error
