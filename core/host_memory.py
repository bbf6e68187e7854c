"""Memory of the host that comes from the system itself, not from what the C allocator keeps."""

from __future__ import annotations

import mmap
import os

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
    """All memory of the machine; where the system does not tell, more than any has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62
