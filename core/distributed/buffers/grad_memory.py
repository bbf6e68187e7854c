"""Reuses the memory of whole gradients: buckets take it, and give it back once it is no longer read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ...comm.collectives import Allocate
from ...host_memory import transient_memory


class GradMemory:
    """Allocates memory for whole gradients, and keeps some of it for the next bucket when it is given back.

    Freeing a gradient's memory and allocating it again costs more than accumulating the gradient, because the system
    maps and zeroes every page again.

    Args:
        dtype, device: dtype and device of the gradients.
        most_kept: for each size in elements, how many unused tensors are kept; tensors of other sizes are freed.
        allocate: allocates memory when no tensor of that size is kept.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_kept: Mapping[int, int] = MappingProxyType({}),
        allocate: Allocate = transient_memory,
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

    def keeps(self, numel: int) -> bool:
        """Returns whether memory of `numel` elements is ever kept."""
        return self._keeps_all or numel in self._most_kept

    def keep_all(self, keeps: bool) -> None:
        """Keeps all memory that is given back from now on; False frees all beyond `most_kept`."""
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
