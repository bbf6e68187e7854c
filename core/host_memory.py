"""Memory of the host that comes from the system itself, not from what the C allocator keeps."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def host_pages(num_bytes: int) -> Tensor:
    """`[num_bytes]` of uint8, zeros: whole pages, which go back to the system as soon as nothing refers to them.

    In huge pages where the system gives them (Linux's `transparent_hugepage` at `madvise` or `always`): the first
    touch of ordinary ones is a fault each 4 KiB.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def total_bytes() -> int:
    """Returns all memory of the machine; where the system does not tell, more than any has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


_LEAST_PASSING_BYTES = 2**20
_is_torchs = False  # set and restored by `passing_memory_seen_by_profilers`, read on every thread


def passing_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[numel]`, of any values: on the CPU it goes back to the system as soon as nothing refers to it.

    The C allocator keeps pieces of up to 32 MiB that were given back to it, whichever thread did, in the midst of what
    else it has handed out; what then fits between them decides how much a process holds at its peak. On an accelerator
    torch's own allocator keeps memory for the next taker.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_PASSING_BYTES or _is_torchs:
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
