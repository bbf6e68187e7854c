"""Brings a rank's micro-batches to its device; on a GPU ahead of their use, while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import torch

from .. import device
from ..comm import streams

Batch = Mapping[str, torch.Tensor]
"""Tensors `[b, s]`: `tokens`, `labels`, `loss_mask`, `position_ids`, and `document_starts` if documents are packed.

Context-parallel ranks get the same whole sequences, and each takes its chunks.
"""

READ_ON_HOST = frozenset({"document_starts"})
"""Tensors of a batch that the host reads, and that therefore stay in its memory."""

BATCHES_AHEAD = 2
"""Micro-batches that are read and copied ahead of use."""


def to_device(batch: Batch) -> Batch:
    """Copies a batch to this process's device, except tensors that the host reads; does not wait for copies of pinned
    memory."""
    here, host = device.current_device(), torch.device("cpu")
    return {
        name: tensor.to(host if name in READ_ON_HOST else here, non_blocking=True) for name, tensor in batch.items()
    }


class Copy(Protocol):
    """A batch that is being copied to the device."""

    def wait(self) -> Batch:
        """Returns the batch, which work that is queued from here on may read."""


class Copies(Protocol):
    """Starts copies of batches to the device. `start` runs on a thread of its own, `Copy.wait` on the trainer's."""

    def start(self, batch: Batch) -> Copy:
        """Queues the copy of a batch."""


class SideStream:
    """Copies batches to this process's GPU on a stream of its own, so that they do not queue behind computation."""

    def __init__(self) -> None:
        self._stream = streams.Stream()  # of the GPU that is current here, which the reading thread takes over

    def start(self, batch: Batch) -> Copy:
        with streams.stream(self._stream):
            return _SideStreamCopy(to_device(batch), streams.record_event())


class _SideStreamCopy:
    def __init__(self, batch: Batch, copied: streams.Event) -> None:
        # On the side stream's memory, which may be given to a later batch once all streams that use it are past it.
        self._batch, self._copied = batch, copied

    def wait(self) -> Batch:
        computing = streams.current_stream()
        computing.wait_event(self._copied)
        for name, tensor in self._batch.items():
            if name not in READ_ON_HOST:
                streams.used_on(tensor, computing)
        return self._batch


class DeviceBatches(Iterator[Batch]):
    """Iterates over a rank's micro-batches, on its device.

    On a GPU a thread reads the next batches and starts their copies while the step runs: the host waits for neither.
    The loader pins what it reads. On CPU batches pass through, as reading ahead would take computation's cores; the
    loader's workers do it where they are wanted.

    A batch that was read and not used leaves no trace: a run counts its samples by step, and one that continues opens
    its loader after the last step's. An error in reading a batch is raised where the batch is asked for.

    Use it in a `with` statement, or `close` it: the thread then ends with the batch that it is reading.

    Args:
        batches: read by one thread at a time, and to its end.
        copies: starts copies; None chooses by the device, and on CPU there are none.
    """

    def __init__(self, batches: Iterator[Batch], copies: Copies | None = None) -> None:
        self._batches = batches
        self._copies = SideStream() if copies is None and streams.is_asynchronous(device.current_device()) else copies
        # Futures of the next batches, in order. `__next__` appends and takes them; the reading thread fulfils them.
        self._ahead: deque[Future[Copy]] = deque()
        # The reading thread. Set here, and shut down by `close`; None if batches are not read ahead.
        self._reader: ThreadPoolExecutor | None = None
        if self._copies is not None:
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
            for _ in range(BATCHES_AHEAD):
                self._ahead.append(self._reader.submit(self._read, self._copies))

    def __next__(self) -> Batch:
        if self._reader is None or self._copies is None:
            return to_device(next(self._batches))
        self._ahead.append(self._reader.submit(self._read, self._copies))
        return self._ahead.popleft().result().wait()

    def _read(self, copies: Copies) -> Copy:
        return copies.start(next(self._batches))

    def close(self) -> None:
        """Stops reading ahead. May be called again."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def __enter__(self) -> DeviceBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
