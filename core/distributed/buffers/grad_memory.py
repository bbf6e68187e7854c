"""Memory of whole gradients, which buckets take when the first gradient arrives and give back when it was reduced."""

from __future__ import annotations

from collections.abc import Mapping

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
        most_kept: of each number of elements, how many that no bucket uses are kept; of the others none.
        allocate: what is not there.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        most_kept: Mapping[int, float],
        allocate: Allocate = passing_memory,
    ) -> None:
        self._dtype, self._device, self._allocate = dtype, device, allocate
        self._most_kept = dict(most_kept)
        # Unused memory by its number of elements, for as long as the wrapper exists. `take` and `give_back` change it,
        # both on the thread that runs backward, or between backwards.
        self._kept: dict[int, list[Tensor]] = {numel: [] for numel in most_kept}

    @property
    def kept(self) -> list[Tensor]:
        """The memory that no bucket uses at this moment."""
        return [memory for kept in self._kept.values() for memory in kept]

    def keeps(self, numel: int) -> bool:
        """Returns whether memory of `numel` elements is kept at all."""
        return numel in self._kept

    def take(self, numel: int) -> Tensor:
        """Returns `[numel]`, of any values."""
        kept = self._kept.get(numel)
        return kept.pop() if kept else self._allocate(numel, self._dtype, self._device)

    def give_back(self, whole: Tensor) -> None:
        """Takes back what `take` gave, once nothing reads or writes it. What is not given back is freed with its last
        reference."""
        numel = whole.numel()
        if self.keeps(numel) and len(self._kept[numel]) < self._most_kept[numel]:
            self._kept[numel].append(whole)
