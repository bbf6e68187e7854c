"""State tensors and masters in 8 or 16 bits: read as fp32, a chunk at a time, and written after an update.

Scales of blocks that are cut over ranks are agreed once a step: each rank encodes its part of such a block again with
the largest magnitude of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.collectives import all_reduce_by_backend
from ...dist_checkpointing.agreement import Ranks
from . import formats
from .places import Places

CHUNK = 1 << 22
"""Elements that are written at a time at most: random bits and codes take some 50 bytes each meanwhile."""


class Stored(ABC):
    """One tensor of `[n]` elements, this rank's part of a tensor of the whole model.

    Args:
        values: `[n]`, its memory, or the larger part of it.
        name: of the whole tensor, which the random bits of its rounding depend on.
    """

    def __init__(self, values: Tensor, places: Places, name: str) -> None:
        self.values, self.places, self.name = values, places, name
        self.parts: dict[str, Tensor] = {}
        """Its memory besides `values`, by kind."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """Returns elements ``[start, end)`` in fp32, in memory of their own."""

    @abstractmethod
    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        """Stores elements ``[start, end)``, of a chunk of `Places.chunks`.

        Args:
            new: in fp32, contiguous.
            step: random bits are those of this step.
        """

    def read_all(self) -> Tensor:
        """Returns all elements in fp32, `[n]`, in memory of their own."""
        return self.read(0, self.places.numel)

    def write_all(self, new: Tensor, step: int) -> None:
        """Stores all elements, from a tensor of any shape, on any device."""
        flat = new.detach().to(self.values.device).reshape(-1)
        for start, end in self.places.chunks(CHUNK) if len(flat) else ():
            self.write(start, end, flat[start:end], step)

    def _bits(self, start: int, end: int, step: int) -> Tensor:
        return formats.random_bits(self.places.places(start, end), formats.key_of(self.name, step))


class Rounded(Stored):
    """In bf16, rounded stochastically."""

    def read(self, start: int, end: int) -> Tensor:
        return self.values[start:end].float()

    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        self.values[start:end] = formats.to_bf16(new, self._bits(start, end, step))


class WithRest(Stored):
    """In bf16, and in 16 bits what is missing to fp32. Exact."""

    def __init__(self, values: Tensor, places: Places, name: str) -> None:
        super().__init__(values, places, name)
        self.parts["rest"] = self._rest = torch.zeros_like(values, dtype=torch.int16)

    def read(self, start: int, end: int) -> Tensor:
        return formats.join(self.values[start:end], self._rest[start:end])

    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        self.values[start:end], self._rest[start:end] = formats.split(new)


class InBlocks(Stored):
    """In codes of 8 bits, with a scale in fp32 for each block of 256 elements of the whole tensor.

    Args:
        rounds_stochastically: else to the nearest code.
    """

    def __init__(
        self, values: Tensor, places: Places, name: str, book: str, is_signed: bool, rounds_stochastically: bool
    ) -> None:
        super().__init__(values, places, name)
        self._book, self._is_signed, self._is_stochastic = book, is_signed, rounds_stochastically
        # Of each block, in the order of `Places`.
        self.parts["scales"] = self.scales = torch.zeros(places.num_blocks, device=values.device)
        self.unagreed: list[tuple[int, int, Tensor, int]] = []
        """Values of shared blocks, by range, with the step. `write` adds, `take_shared` encodes and clears them."""

    def read(self, start: int, end: int) -> Tensor:
        scales = self.places.of_blocks(start, end, self.scales)
        return formats.decode(self.values[start:end], scales, self._book, self._is_signed)

    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        largest = self.places.write_largest(start, end, new, self.scales)
        largest.masked_fill_(largest < formats.LEAST_SCALE, 0.0)
        self._encode(start, end, new, step)
        for first, last in self.places.shared_ranges:
            if start <= first < end:
                self.unagreed.append((first, last, new[first - start : last - start].clone(), step))

    def _encode(self, start: int, end: int, new: Tensor, step: int) -> None:
        scales = self.places.of_blocks(start, end, self.scales)
        bits = self._bits(start, end, step) if self._is_stochastic else None
        self.values[start:end] = formats.encode(new, scales, self._book, self._is_signed, bits)

    def take_shared(self, scales: Tensor) -> None:
        """Encodes shared blocks by the scales of all their ranks."""
        self.scales[self.places.shared] = scales
        for written in self.unagreed:
            self._encode(*written)
        self.unagreed = []


class SharedScales:
    """Agrees on the scales of blocks that are cut over ranks: one all-reduce of their maxima, or none without such.

    Args:
        columns: those in blocks. All ranks of the group make an instance together.
        group: the ranks that hold parts of the same tensors; None is this rank alone.
    """

    def __init__(self, columns: Iterable[Stored], group: dist.ProcessGroup | None, device: torch.device) -> None:
        in_blocks = {c.name: c for c in columns if isinstance(c, InBlocks) and c.places.shared_numbers}
        own = {name: column.places.shared_numbers for name, column in in_blocks.items()}
        of_ranks = Ranks(group, alone=group is None).all_gather(own)
        blocks = sorted({(name, n) for of_rank in of_ranks for name, numbers in of_rank.items() for n in numbers})
        slots = {block: slot for slot, block in enumerate(blocks)}
        self._group, self._device = group, device
        self.num_shared = len(blocks)
        """Blocks that are cut over ranks, of all columns."""
        # Of each column with shared blocks, where its own are among those of all ranks, `[blocks]`.
        self._slots = {
            column: torch.tensor([slots[name, n] for n in own[name]], device=device)
            for name, column in in_blocks.items()
        }

    def agree(self) -> None:
        """Gives all shared blocks that were written their scales. All ranks call it, after each update."""
        if not self.num_shared:
            return
        written = {column: slots for column, slots in self._slots.items() if column.unagreed}
        largest = torch.zeros(self.num_shared, device=self._device)
        for column, slots in written.items():
            largest[slots] = column.scales[column.places.shared].to(self._device)
        all_reduce_by_backend(largest, self._group, what="scales of 8-bit blocks", op=dist.ReduceOp.MAX)
        for column, slots in written.items():
            column.take_shared(largest[slots].to(column.scales.device))
