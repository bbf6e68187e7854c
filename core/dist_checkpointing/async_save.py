"""Writes checkpoints in the background: training waits only until its tensors are copied to the host.

`HostStaging` copies a rank's part of a checkpoint, `AsyncSaver` writes the copies on a thread.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import device
from ..comm import streams
from ..comm.collectives import all_reduce_by_backend
from ..errors import CheckpointError
from ..host_memory import host_pages
from .format.folders import Retention
from .format.writer import Key, Offer, held_pieces, offers
from .serialization import save

_ALIGNMENT_BYTES = 64


class HostStaging:
    """Host memory for copies, allocated by the first checkpoint and reused by later ones.

    It is as large as this rank's part of a checkpoint, and pinned if copies come from a GPU. Ranks plan together which
    pieces each of them writes. If no rank's layout has changed since the last checkpoint, a rank knows its pieces
    before the plan: it copies them at once, and the ranks plan in the background.

    The training thread calls `begin` and waits for `done`; the thread that writes calls `take`.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        """Set when the copies are complete, so that the state may change. `begin` clears it. `begin` or `take` sets
        it, and so does `AsyncSaver` when the thread ends, also after an error."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        """Owns the copies of the last checkpoint. `_copy` grows it, and overwrites it for the next one."""
        self._layout: dict[str, Offer] | None = None
        """Layout of the last checkpoint's state. `begin` sets it; None before the first."""
        self._planned: list[Key] | None = None
        """The pieces that this rank writes for `_layout`. `take` sets it; `begin` clears it when the layout
        changes."""
        self._ahead: dict[Key, Tensor] | None = None
        """Copies that the last `begin` made before the plan, as views of `_memory`; None if it made none. Each `begin`
        replaces it."""
        self._stream: streams.Stream | None = None
        """The stream of the GPU that training writes the state on, where copies are queued, from either thread; None
        on CPU. Each `begin` sets it."""

    def begin(self, state: Mapping[str, Tensor], agree: Callable[[bool], bool]) -> None:
        """Begins a checkpoint of `state`. Takes its copies now if the pieces that this rank writes are known.

        Args:
            agree: returns whether its argument is true on all ranks; collective.
        """
        self.done.clear()
        tensors = {
            name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)
        }  # `save` refuses others
        layout = offers(tensors)
        known = agree(self._planned is not None and layout == self._layout)
        self._layout, self._ahead = layout, None
        on_gpu = any(streams.is_asynchronous(tensor.device) for tensor in tensors.values())
        self._stream = streams.current_stream() if on_gpu else None
        if not known:
            self._planned = None
            return
        planned, held = self._planned or [], held_pieces(tensors)
        copies = self._copy([held[key] for key in planned])
        self._ahead = dict(zip(planned, copies, strict=True))
        self.done.set()

    def take(self, keys: Sequence[Key], held: Mapping[Key, Tensor]) -> list[Tensor]:
        """Returns contiguous host copies of the planned boxes `keys` of `held`. Overwrites those of the last
        checkpoint."""
        if self._ahead is None:
            copies = self._copy([held[key] for key in keys])
            self._planned = list(keys)
            self.done.set()
            return copies
        if missing := [name for name, box in keys if (name, box) not in self._ahead]:
            raise CheckpointError(
                "the ranks planned otherwise than for the last checkpoint, which had the same layout: "
                f"{missing[0]} was not copied in time; save it again"
            )
        return [self._ahead[key] for key in keys]

    def _copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = self._stream is not None
        if len(self._memory) < end or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before the larger one is allocated
            self._memory = streams.pinned([end], torch.uint8) if on_gpu else host_pages(end)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            copy = self._memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            with streams.stream(self._stream):
                copies.append(copy.copy_(tensor, non_blocking=on_gpu))
        if self._stream is not None:
            self._stream.synchronize()
        return copies


_GROUP_LIMIT = timedelta(hours=6)
"""How long ranks that have written wait for one that still writes. A rank that has ended is noticed at once."""


class AsyncSaver:
    """Writes one checkpoint at a time in the background, on a gloo group of its own. Collective over all ranks.

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
        """Begins a checkpoint, and returns when `state` may change. Takes the arguments of `save`.

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
            "stage": self._staging.take,
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
