"""Memory for what comes and goes within a step, and is to leave no trace in a process' peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..host_memory import host_pages


def passing_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[numel]`, of any values: on the CPU it goes back to the system as soon as nothing refers to it.

    The C allocator keeps pieces of up to 32 MiB that were given back to it, whichever thread did, in the midst of what
    else it has handed out; what then fits between them decides how much a process holds at its peak. On an accelerator
    torch's own allocator keeps memory for the next taker.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_BYTES or _is_torchs:
        return torch.empty(numel, dtype=dtype, device=device)
    return host_pages(num_bytes).view(dtype)


@contextmanager
def passing_memory_seen_by_profilers() -> Iterator[None]:
    """Torch's own memory inside it, in all threads: its profiler reports nothing else."""
    global _is_torchs
    before, _is_torchs = _is_torchs, True
    try:
        yield
    finally:
        _is_torchs = before


_LEAST_BYTES = 2**20
_is_torchs = False
