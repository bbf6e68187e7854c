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

    def tensors(self) -> dict[str, Tensor]:
        """Returns its memory besides `values`, by kind."""
        return {}

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
        self.rest = torch.zeros_like(values, dtype=torch.int16)

    def read(self, start: int, end: int) -> Tensor:
        return formats.join(self.values[start:end], self.rest[start:end])

    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        self.values[start:end], self.rest[start:end] = formats.split(new)

    def tensors(self) -> dict[str, Tensor]:
        return {"rest": self.rest}


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
        self.scales = torch.zeros(places.num_blocks, device=values.device)
        # Values of shared blocks, by range, with the step. `write` adds, `take_shared` clears once scales are agreed.
        self._unagreed: list[tuple[int, int, Tensor, int]] = []

    def read(self, start: int, end: int) -> Tensor:
        scales = self.places.of_blocks(start, end, self.scales)
        return formats.decode(self.values[start:end], scales, self._book, self._is_signed)

    def write(self, start: int, end: int, new: Tensor, step: int) -> None:
        self.places.write_largest(start, end, new, self.scales)
        self.scales.masked_fill_(self.scales < formats.LEAST_SCALE, 0.0)
        self._encode(start, end, new, step)
        for first, last in self.places.shared_ranges:
            if start <= first < end:
                self._unagreed.append((first, last, new[first - start : last - start].clone(), step))

    def _encode(self, start: int, end: int, new: Tensor, step: int) -> None:
        scales = self.places.of_blocks(start, end, self.scales)
        bits = self._bits(start, end, step) if self._is_stochastic else None
        self.values[start:end] = formats.encode(new, scales, self._book, self._is_signed, bits)

    def shared_scales(self) -> Tensor | None:
        """Returns this rank's scales of shared blocks, or None if none was written since they were agreed."""
        return self.scales[self.places.shared] if self._unagreed else None

    def take_shared(self, scales: Tensor) -> None:
        """Encodes shared blocks by the scales of all their ranks."""
        self.scales[self.places.shared] = scales
        for written in self._unagreed:
            self._encode(*written)
        self._unagreed = []

    def tensors(self) -> dict[str, Tensor]:
        return {"scales": self.scales}


class SharedScales:
    """Agrees on the scales of blocks that are cut over ranks: one all-reduce of their maxima, or none without such.

    Args:
        columns: those in blocks. All ranks of the group make an instance together.
        group: the ranks that hold parts of the same tensors; None is this rank alone.
    """

    def __init__(self, columns: Iterable[Stored], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._columns = {c.name: c for c in columns if isinstance(c, InBlocks)}
        self._group, self._device = group, device
        own = {name: c.places.shared_numbers for name, c in self._columns.items()}
        shared: dict[str, set[int]] = {}
        for of_rank in Ranks(group, alone=group is None).all_gather(
            {n: blocks for n, blocks in own.items() if blocks}
        ):
            for name, blocks in of_rank.items():
                shared.setdefault(name, set()).update(blocks)
        # Of each column with shared blocks, where its own are among those of all ranks, `[blocks]`.
        self._slots: dict[str, Tensor] = {}
        self._size = 0
        for name in sorted(shared):
            place = {block: self._size + index for index, block in enumerate(sorted(shared[name]))}
            self._slots[name] = torch.tensor([place[b] for b in own.get(name, ())], dtype=torch.int64, device=device)
            self._size += len(place)

    @property
    def num_shared(self) -> int:
        """Blocks that are cut over ranks, of all columns."""
        return self._size

    def agree(self) -> None:
        """Gives all shared blocks that were written their scales. All ranks call it, after each update."""
        if not self._size:
            return
        largest = torch.zeros(self._size, device=self._device)
        own = {name: self._columns[name].shared_scales() for name in self._slots if name in self._columns}
        for name, scales in own.items():
            if scales is not None:
                largest[self._slots[name]] = scales.to(self._device)
        all_reduce_by_backend(largest, self._group, what="scales of 8-bit blocks", op=dist.ReduceOp.MAX)
        for name, scales in own.items():
            if scales is not None:
                self._columns[name].take_shared(largest[self._slots[name]].to(scales.device))
