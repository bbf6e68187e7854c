"""Keeps the memory of whole gradients between uses: buckets take it, and give it back once nothing reads it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ...comm.memory import Allocate
from ...host_memory import passing_memory


class GradMemory:
    """Allocates the memory of whole gradients, and keeps some of what is given back for the next bucket.

    To free a gradient's memory and allocate it again costs more than to add the gradient up: the system hands out
    each page again, and zeroes it.

    Args:
        dtype, device: of the gradients.
        most_kept: for each size in elements, how many unused tensors are kept; those of other sizes are freed.
        allocate: allocates memory when none of that size is kept.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_kept: Mapping[int, int] = MappingProxyType({}),
        allocate: Allocate = passing_memory,
    ) -> None:
        self._dtype, self._device, self._allocate = dtype, device, allocate
        self._most_kept = most_kept
        # Whether all memory that is given back is kept, instead of `most_kept`; `keep_all` sets it.
        self._keeps_all = False
        # Unused memory by its number of elements, for as long as the wrapper exists. `take` and `give_back` change it
        # on the thread that runs backward, or between backwards, and `keep_all` between steps.
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def kept(self) -> list[Tensor]:
        """The memory that no bucket uses at this moment."""
        return [memory for kept in self._kept.values() for memory in kept]

    def keeps(self, numel: int) -> bool:
        """Returns whether memory of `numel` elements is kept at all."""
        return self._keeps_all or numel in self._most_kept

    def keep_all(self, keeps: bool) -> None:
        """Keeps all memory that is given back from now on; False: frees what is more than `most_kept`."""
        self._keeps_all = keeps
        if not keeps:
            for numel, kept in self._kept.items():
                del kept[self._most_kept.get(numel, 0) :]

    def take(self, numel: int) -> Tensor:
        """Returns `[numel]`, of any values."""
        kept = self._kept.get(numel)
        return kept.pop() if kept else self._allocate(numel, self._dtype, self._device)

    def give_back(self, whole: Tensor) -> None:
        """Takes back what `take` gave, once nothing reads or writes it. What is not given back is freed with its last
        reference."""
        kept = self._kept.setdefault(whole.numel(), [])
        if self._keeps_all or len(kept) < self._most_kept.get(whole.numel(), 0):
            kept.append(whole)
