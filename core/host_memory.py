"""Allocates host memory from the system, not from the C allocator's free lists."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def host_pages(num_bytes: int) -> Tensor:
    """Returns `[num_bytes]` zeros of uint8 in whole pages, which return to the system with their last reference.

    Uses huge pages if the system has them (Linux's `transparent_hugepage` at `madvise` or `always`): the first touch
    of normal pages is a fault for each 4 KiB.
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
    """Returns the total memory of the machine in bytes, or if it is unknown a number that exceeds any machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


_LEAST_TRANSIENT_BYTES = 2**20
_is_torchs = False
"""Whether `transient_memory` uses torch's allocator, which profilers see. Set by `transient_memory_seen_by_profilers`,
which restores it, on one thread; every thread reads it."""


def transient_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `[numel]` uninitialised elements. On the CPU they return to the system with their last reference.

    The C allocator keeps freed blocks of up to 32 MiB between other allocations, from any thread, and the resulting
    fragmentation raises a process's peak. On an accelerator torch's allocator reuses memory.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_TRANSIENT_BYTES or _is_torchs:
        return torch.empty(numel, dtype=dtype, device=device)
    return host_pages(num_bytes).view(dtype)


@contextmanager
def transient_memory_seen_by_profilers() -> Iterator[None]:
    """Makes `transient_memory` use torch's allocator, in all threads: torch's profiler reports only that."""
    global _is_torchs
    before, _is_torchs = _is_torchs, True
    try:
        yield
    finally:
        _is_torchs = before
