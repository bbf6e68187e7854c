"""Where the elements of a rank's part of a tensor are in the whole tensor, and the blocks that they belong to.

Blocks are runs of 256 elements of the whole tensor in row-major order, however it is cut over ranks, by tensor
parallelism too. A cut inside of a block leaves each side a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dist_checkpointing.global_view import held_boxes

BLOCK = 256


@dataclass(frozen=True)
class _Run:
    """A box of the whole tensor, in the order of this rank's memory: equal runs of elements that follow each other."""

    first: int
    """Where it begins in this rank's memory."""
    numel: int
    origin: int
    """Place of the first element in the whole tensor."""
    length: int
    """Elements without a gap."""
    outer: tuple[tuple[int, int], ...]
    """Sizes and strides of the dimensions that number the runs, the outermost first."""

    def places(self, numbers: Tensor) -> Tensor:
        """Returns the places in the whole tensor of elements that are numbered from `first` on."""
        if not self.outer:
            return numbers + self.origin
        places = numbers % self.length + self.origin
        numbers = numbers // self.length
        for size, stride in reversed(self.outer):
            places += numbers % size * stride
            numbers = numbers // size
        return places


def _runs_of(whole: Tensor) -> list[_Run]:
    strides = [math.prod(whole.shape[dim + 1 :]) for dim in range(whole.ndim)]
    runs: list[_Run] = []
    first = 0
    for offsets, part in held_boxes(whole):
        sizes, inner = tuple(part.shape), part.ndim
        while inner and sizes[inner - 1 :] == tuple(whole.shape[inner - 1 :]):
            inner -= 1
        inner = max(inner - 1, 0)  # one dimension more: its elements, too, follow each other
        numel, origin = math.prod(sizes), sum(map(math.prod, zip(offsets, strides, strict=True)))
        outer = tuple((size, stride) for size, stride in zip(sizes[:inner], strides, strict=False) if size > 1)
        last = runs[-1] if runs else None
        if last and not last.outer and not outer and last.origin + last.numel == origin:
            runs[-1] = _Run(last.first, last.numel + numel, last.origin, last.numel + numel, ())
        elif numel:
            runs.append(_Run(first, numel, origin, math.prod(sizes[inner:]), outer))
        first += numel
    return runs


class Places:
    """The places of a part's elements, which is `[n]` in this rank's memory.

    Args:
        whole: view of the part as a tensor of the whole model, as `MainParam.whole` returns it.

    Attributes:
        num_blocks: blocks that the part has elements of. Their order is that of the elements, or, where they are
            scattered, of their numbers in the whole tensor.
        shared: indices of blocks that other ranks have elements of.
        shared_numbers: numbers of these in the whole tensor.
        shared_ranges: elements of these, ``[start, end)``, this rank's parts of whole blocks each.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self._runs, self._device = _runs_of(whole), device
        self.numel = sum(run.numel for run in self._runs)
        ends = {run.origin % BLOCK for run in self._runs} | {run.length % BLOCK for run in self._runs[:-1]}
        ends |= {stride % BLOCK for run in self._runs for _, stride in run.outer}
        ends |= {run.length % BLOCK for run in self._runs if run.outer}
        # Elements of the first block that other ranks have, if in memory one block follows the other. None if not.
        self._lead: int | None = None
        if len(self._runs) == 1 and not self._runs[0].outer:
            self._lead = self._runs[0].origin % BLOCK
        elif ends <= {0}:
            self._lead = 0
        if self._lead is None:
            numbers, counts = (self.places(0, self.numel) // BLOCK).unique(return_counts=True)
        else:
            starts = torch.arange(-self._lead, self.numel, BLOCK, device=device)
            counts = (starts + BLOCK).clamp(max=self.numel) - starts.clamp(min=0)
            firsts = [torch.arange(0, run.numel + self._lead, BLOCK, device=device) for run in self._runs]
            of_runs = [run.places(first - self._lead) // BLOCK for run, first in zip(self._runs, firsts, strict=True)]
            numbers = torch.cat(of_runs or [starts])
        self.num_blocks = len(numbers)
        # Of each block its number in the whole tensor, where they are scattered.
        self._numbers = numbers if self._lead is None else numbers[:0]
        self.shared = (counts < (whole.numel() - numbers * BLOCK).clamp(max=BLOCK)).nonzero().flatten()
        self.shared_numbers = numbers[self.shared].tolist()
        self.shared_ranges = self._ranges_of_shared()

    def places(self, start: int, end: int) -> Tensor:
        """Returns the places of the elements ``[start, end)`` of the part in the whole tensor, `[end - start]`."""
        parts = [
            run.places(torch.arange(max(start - run.first, 0), min(end - run.first, run.numel), device=self._device))
            for run in self._runs
            if start < run.first + run.numel and end > run.first
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self._device)

    def chunks(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of at most so many elements, which cut no block. One range if blocks are scattered."""
        if self._lead is None:
            yield 0, self.numel
            return
        ends = [*range(elements // BLOCK * BLOCK - self._lead, self.numel, elements // BLOCK * BLOCK), self.numel]
        yield from zip([0, *ends], ends, strict=False)

    def _ranges_of_shared(self) -> list[tuple[int, int]]:
        if self._lead is None:
            return [(0, self.numel)] if len(self.shared) else []
        starts = (self.shared * BLOCK - self._lead).tolist()
        return [(max(0, start), min(start + BLOCK, self.numel)) for start in starts]

    def of_blocks(self, start: int, end: int, scales: Tensor) -> Tensor:
        """Returns for elements ``[start, end)``, whole blocks of this rank's, what is theirs in `scales`.

        Args:
            scales: `[blocks]`.
        """
        if self._lead is None:
            return scales[self._indices()]
        first, skipped = divmod(start + self._lead, BLOCK)
        last = -(-(end + self._lead) // BLOCK)
        return scales[first:last].repeat_interleave(BLOCK)[skipped : skipped + end - start]

    def write_largest(self, start: int, end: int, values: Tensor, into: Tensor) -> None:
        """Writes the largest magnitude of each block in ``[start, end)`` into its place in `into`, `[blocks]`."""
        if self._lead is None:
            into.zero_().scatter_reduce_(0, self._indices(), values.abs(), "amax")
            return
        first, skipped = divmod(start + self._lead, BLOCK)
        padded = F.pad(values.abs(), (skipped, -(skipped + end - start) % BLOCK)).view(-1, BLOCK)
        torch.amax(padded, 1, out=into[first : first + len(padded)])

    def _indices(self) -> Tensor:
        """Returns the index of each element's block, where blocks are scattered."""
        return torch.searchsorted(self._numbers, self.places(0, self.numel) // BLOCK)
