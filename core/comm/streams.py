"""Streams of a GPU, and the points at which they wait for each other: no other module of `core` asks torch for them.

Call these through the module, ``streams.current_stream()``: simulated streams take their place in `tests/streams`.
Nothing here is called for a device that is not asynchronous.

Streams are made by `lane` (collectives), `background_copies`, offloaded activations and `shardstack.training.data`
(copies of batches). Host copies of a checkpoint are queued on the stream that training uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import Event, Stream, current_stream, is_current_stream_capturing, stream, synchronize

__all__ = ["Event", "Stream", "current_stream", "is_current_stream_capturing", "stream", "synchronize"]
"""Names of torch that other modules use from here, unchanged."""


def is_asynchronous(device: torch.device) -> bool:
    """Returns whether operations on a device are queued on streams, and end after the call that queues them."""
    return device.type == "cuda"


def record_event() -> Event:
    """Returns a point behind the work that is queued on the current stream."""
    event: Event = current_stream().record_event()
    return event


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocates host memory that a device copies from and to while the host goes on. It is not initialised."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def used_on(tensor: Tensor, user: Stream) -> None:
    """Keeps the allocator from reusing a tensor's memory until the work queued on `user` is done."""
    tensor.record_stream(user)
