"""Where the elements of a rank's part of a tensor are in the whole tensor, and the blocks that they belong to.

Blocks are runs of 256 elements of the whole tensor in row-major order, however it is cut over ranks, by tensor
parallelism too. A cut inside of a block leaves each side a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...dist_checkpointing.global_view import held_boxes

BLOCK = 256


@dataclass(frozen=True)
class _Box:
    """A box of the whole tensor, whose elements follow each other in this rank's memory."""

    first: int
    """Where it begins in this rank's memory."""
    numel: int
    origin: int
    """Place of its first element in the whole tensor."""
    dims: tuple[tuple[int, int], ...]
    """Sizes and strides in the whole tensor, the innermost first. Dims without a gap between their rows are one."""

    def places(self, numbers: Tensor) -> Tensor:
        """Returns the places in the whole tensor of elements that are numbered from `first` on."""
        places = torch.full_like(numbers, self.origin)
        for size, stride in self.dims:
            places += numbers % size * stride
            numbers = numbers // size
        return places

    def begins_blocks(self) -> bool:
        """Returns whether blocks begin at each multiple of their size in this rank's memory."""
        length = self.dims[0][0] if len(self.dims) > 1 else 0  # of rows, between which there are gaps
        return not any(n % BLOCK for n in (self.first, self.origin, length, *(stride for _, stride in self.dims[1:])))


def _boxes_of(whole: Tensor) -> list[_Box]:
    """Returns the boxes of a part that have elements. Their places rise, as those of a box do."""
    strides = [math.prod(whole.shape[dim + 1 :]) for dim in range(whole.ndim)]
    boxes, first = list[_Box](), 0
    for offsets, part in held_boxes(whole):
        dims = [(1, 1)]
        for size, stride in zip(reversed(part.shape), reversed(strides), strict=True):
            if stride == math.prod(dims[-1]):
                dims[-1] = size * dims[-1][0], dims[-1][1]
            elif size > 1:
                dims.append((size, stride))
        if part.numel():
            origin = sum(map(math.prod, zip(offsets, strides, strict=True)))
            boxes.append(_Box(first, part.numel(), origin, tuple(dims)))
        first += part.numel()
    return boxes


class Places:
    """The places of a part's elements, which is `[n]` in this rank's memory.

    Args:
        whole: view of the part as a tensor of the whole model, as `MainParam.whole` returns it.

    Attributes:
        num_blocks: blocks that the part has elements of. Their order is that of the elements.
        shared: indices of blocks that other ranks have elements of.
        shared_numbers: numbers of these in the whole tensor.
        shared_ranges: elements of these, ``[start, end)``, this rank's parts of whole blocks each.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        boxes = _boxes_of(whole)
        self.numel, self._device = sum(box.numel for box in boxes), device
        self._origin = boxes[0].origin if boxes else 0
        has_gaps = any(len(box.dims) > 1 or box.origin - box.first != self._origin for box in boxes)
        self._boxes = boxes if has_gaps else []
        # Elements of the first block that other ranks have, if in memory one block follows the other. None if blocks
        # are scattered, so that a block's elements have others in between.
        self._lead = self._origin % BLOCK if not has_gaps or all(box.begins_blocks() for box in boxes) else None
        if self._lead is None:
            numbers, counts = (self.places(0, self.numel) // BLOCK).unique_consecutive(return_counts=True)
        else:
            numbers = self.places(-self._lead, self.numel, BLOCK) // BLOCK
            starts = torch.arange(-self._lead, self.numel, BLOCK, device=device)
            counts = (starts + BLOCK).clamp(max=self.numel) - starts.clamp(min=0)
        self.num_blocks = len(numbers)
        # Of each block its number in the whole tensor, where they are scattered.
        self._numbers = numbers if self._lead is None else numbers[:0]
        self.shared = (counts < (whole.numel() - numbers * BLOCK).clamp(max=BLOCK)).nonzero().flatten()
        self.shared_numbers = numbers[self.shared].tolist()
        self.shared_ranges = [(0, self.numel)] if len(self.shared) else []
        if self._lead is not None:
            starts = (self.shared * BLOCK - self._lead).tolist()
            self.shared_ranges = [(max(0, start), min(start + BLOCK, self.numel)) for start in starts]

    def places(self, start: int, end: int, step: int = 1) -> Tensor:
        """Returns the places in the whole tensor of the elements ``range(start, end, step)`` of the part, in int64.

        Args:
            start: below 0 has the place of the first element.
        """
        elements = torch.arange(start, end, step, device=self._device)
        elements[:1].clamp_(min=0)
        places = elements + self._origin
        for box in self._boxes:
            if start < box.first + box.numel and box.first < end:
                places = torch.where(elements < box.first, places, box.places(elements - box.first))
        return places

    def chunks(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of at most so many elements, which cut no block. One range if blocks are scattered."""
        step = elements // BLOCK * BLOCK
        ends = [*range(step - self._lead, self.numel, step)] if self._lead is not None else []
        yield from zip([0, *ends], [*ends, self.numel], strict=True)

    def of_blocks(self, start: int, end: int, scales: Tensor) -> Tensor:
        """Returns for elements ``[start, end)``, whole blocks of this rank's, what is theirs in `scales`.

        Args:
            scales: `[blocks]`.
        """
        first, last, slots = self._slots(start, end)
        return scales[first:last].repeat_interleave(BLOCK)[slots]

    def write_largest(self, start: int, end: int, values: Tensor, into: Tensor) -> Tensor:
        """Writes the largest magnitude of blocks in ``[start, end)`` into `into`, `[blocks]`, and returns these."""
        first, last, slots = self._slots(start, end)
        whole = values.new_zeros(last - first, BLOCK)
        whole.view(-1)[slots] = values.abs()
        return torch.amax(whole, 1, out=into[first:last])

    def _slots(self, start: int, end: int) -> tuple[int, int, slice | Tensor]:
        """Returns the indices of a chunk's blocks, ``[first, last)``, and where its elements are in these."""
        if self._lead is None:
            places = self.places(start, end)
            return 0, self.num_blocks, torch.searchsorted(self._numbers, places // BLOCK) * BLOCK + places % BLOCK
        first, skipped = divmod(start + self._lead, BLOCK)
        return first, -(-(end + self._lead) // BLOCK), slice(skipped, skipped + end - start)
