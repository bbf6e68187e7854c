"""Copies tensors of a device into host memory of any kind, while the device computes and the main thread goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import streams
from .messages import as_bytes

CHUNK_BYTES = 1 << 26
"""Bytes of each of the two chunks of pinned memory that copies pass through."""


class BackgroundCopies:
    """A stream of its own, and two chunks: the device fills one while a thread empties the other.

    Memory that is not pinned, as of a mapped file, takes copies from a device on the stream that computes alone, and
    the host waits for each.
    """

    def __init__(self) -> None:
        # Both made by the first copy from a GPU, for this object's life. The thread that copies alone uses them.
        self._stream: streams.Stream | None = None
        self._chunks: list[Tensor] = []

    @staticmethod
    def begin(values: Iterable[Tensor]) -> streams.Event | None:
        """Returns the point behind all that is queued, which `copy` waits for. None: all is on the host."""
        return streams.record_event() if any(streams.is_asynchronous(value.device) for value in values) else None

    def copy(self, targets: Sequence[Tensor], values: Sequence[Tensor], after: streams.Event | None) -> None:
        """Copies values as they are at `after` into contiguous targets on the host, and returns when they are there.

        Values must not change until then. Call it on any thread, one at a time.
        """
        with streams.stream(self._stream_for(values)):
            if after is not None:
                streams.current_stream().wait_event(after)
            # Chunks that the device fills, in order: the point at which it has, the chunk, and where it goes.
            filling: deque[tuple[streams.Event, Tensor, Tensor]] = deque()
            for target, value in zip(targets, values, strict=True):
                if not streams.is_asynchronous(value.device):
                    target.copy_(value.detach())
                    continue
                parts = as_bytes(value.detach().contiguous()).split(CHUNK_BYTES)
                for part, to in zip(parts, as_bytes(target).split(CHUNK_BYTES), strict=True):
                    if len(filling) == len(self._chunks):
                        _empty(*filling.popleft())
                    chunk = self._chunks[0][: len(part)]
                    self._chunks.reverse()
                    chunk.copy_(part, non_blocking=True)
                    filling.append((streams.record_event(), chunk, to))
            while filling:
                _empty(*filling.popleft())

    def _stream_for(self, values: Iterable[Tensor]) -> streams.Stream | None:
        device = next((value.device for value in values if streams.is_asynchronous(value.device)), None)
        if self._stream is None and device is not None:
            self._stream = streams.Stream(device)
            self._chunks = [streams.pinned([CHUNK_BYTES], torch.uint8) for _ in range(2)]
        return self._stream


def _empty(filled: streams.Event, chunk: Tensor, target: Tensor) -> None:
    filled.synchronize()
    target.copy_(chunk)
