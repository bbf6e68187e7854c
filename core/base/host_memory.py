"""Allocates host memory: from the system, not from the C allocator's free lists, and kept for another use."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import Seam


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


def shared_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a contiguous tensor on the host, in row-major order. Shares them, and keeps them alive.

    Unlike `Tensor.numpy`, after which torch never resizes the storage again, so that no wrapper could release it.
    """
    interface = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))


AS_HOST_MEMORY: Seam[Callable[[Tensor], Tensor]] = Seam(lambda tensor: tensor)
"""Returns its argument, memory of the host for what a device offloads. It tells the planner, where the device is the
CPU too, what is no memory of the device."""

_LEAST_TRANSIENT_BYTES = 2**20

_IS_TORCHS: Seam[bool] = Seam(False)
"""Whether `transient_memory` uses torch's allocator."""


def transient_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `[numel]` uninitialised elements. On the CPU they return to the system with their last reference.

    The C allocator keeps freed blocks of up to 32 MiB between other allocations, from any thread, and the resulting
    fragmentation raises a process's peak. On an accelerator torch's allocator reuses memory.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_TRANSIENT_BYTES or _IS_TORCHS.value:
        return torch.empty(numel, dtype=dtype, device=device)
    return host_pages(num_bytes).view(dtype)


def transient_memory_seen_by_profilers() -> AbstractContextManager[None]:
    """Makes `transient_memory` use torch's allocator, in all threads: torch's profiler reports only that."""
    return _IS_TORCHS.replaced(True)


class ReusedMemory:
    """Allocates memory, and keeps some of the returned memory for the next use.

    Freeing a gradient's memory and allocating it again costs more than accumulating the gradient, because the system
    maps and zeroes every page again.

    Args:
        most_kept: for each size in elements, how many unused tensors are kept; tensors of other sizes are freed.
        allocate: allocates memory when no tensor of that size is kept.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_kept: Mapping[int, int] = MappingProxyType({}),
        allocate: Callable[[int, torch.dtype, torch.device], Tensor] = transient_memory,
    ) -> None:
        self._dtype, self._device, self._allocate = dtype, device, allocate
        self._most_kept = most_kept
        # Whether all memory that is given back is kept, regardless of `most_kept`. `keep_all` sets and clears it.
        self._keeps_all = False
        # Owns unused memory, by number of elements, for the wrapper's lifetime. `give_back` adds and `take` removes,
        # on the thread that runs backward or between backwards; `keep_all(False)` drops the surplus, between steps.
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def kept(self) -> list[Tensor]:
        """Memory that is not in use."""
        return [memory for kept in self._kept.values() for memory in kept]

    def free_kept(self) -> None:
        """Frees the memory that is not in use."""
        self._kept.clear()

    def keeps(self, numel: int) -> bool:
        """Returns whether memory of `numel` elements is ever kept."""
        return self._keeps_all or numel in self._most_kept

    def keep_all(self, keeps: bool) -> None:
        """Keeps all memory that is given back from now on. False frees all beyond `most_kept`."""
        self._keeps_all = keeps
        if not keeps:
            for numel, kept in self._kept.items():
                del kept[self._most_kept.get(numel, 0) :]

    def take(self, numel: int) -> Tensor:
        """Returns an uninitialized tensor `[numel]`."""
        kept = self._kept.get(numel)
        return kept.pop() if kept else self._allocate(numel, self._dtype, self._device)

    def give_back(self, whole: Tensor) -> None:
        """Takes back a tensor that `take` returned. Call it once no stream or thread uses the tensor any more.

        A tensor that is never given back is freed with its last reference.
        """
        kept = self._kept.setdefault(whole.numel(), [])
        if self._keeps_all or len(kept) < self._most_kept.get(whole.numel(), 0):
            kept.append(whole)


_ALIGNMENT_BYTES = 64
"""Alignment of a lent tensor's first byte, as torch aligns its own."""


class LentMemory:
    """Host memory that is lent again once nothing refers to the tensor that it was lent as.

    New memory costs a page fault for each 4 KiB, which takes longer than to receive the bytes over a local network.
    An accelerator's allocator keeps memory itself. All of it stays as long as a tensor that is lent.

    Args:
        num_bytes: of the memory, allocated by the first loan. A tensor that finds no room gets memory of its own.
        least_bytes: smaller tensors get memory of their own.
    """

    def __init__(self, num_bytes: int, *, least_bytes: int = 1) -> None:
        self._num_bytes, self._least_bytes = num_bytes, least_bytes  # fixed
        # None until the first loan, fixed from then on.
        self._memory: Tensor | None = None
        # The part of each tensor that is lent, in order. The array lives as long as the tensor's storage, which alone
        # owns it. `take` adds parts, and drops those whose array is gone: on the main thread, or in a backward on
        # autograd's, never on both at once.
        self._lent: list[tuple[int, int, weakref.ref[Any]]] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The memory as a tensor of bytes, or nothing before the first loan."""
        return [] if self._memory is None else [self._memory]

    def free(self) -> None:
        """Drops the memory: it is freed with the last tensor that is lent, and the next loan allocates it again."""
        self._memory, self._lent = None, []

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor with a storage of its own."""
        num_bytes, start = math.prod(shape) * dtype.itemsize, 0
        self._lent = [part for part in self._lent if part[2]() is not None]
        for first, end, _ in self._lent:
            if start + num_bytes <= first:
                break
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if device.type != "cpu" or num_bytes < self._least_bytes or start + num_bytes > self._num_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        if self._memory is None:  # on the CPU, whatever torch's default device is
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu")
        array = self._memory.numpy()[start : start + num_bytes]
        self._lent.append((start, start + num_bytes, weakref.ref(array)))
        self._lent.sort(key=itemgetter(0))
        return torch.from_numpy(array).view(dtype).view(shape)
