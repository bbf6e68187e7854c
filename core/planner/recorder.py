"""What a run allocates, computes and sends, as it is recorded in order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..distributed.plan.parts import sent_bytes

Kind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "send", "to the host", "from the host"
]


class Ranks(tuple[int, ...]):
    """The ranks of a group, which are hashed once: there are up to thousands of them."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


HOST = Ranks((-1,))
"""The host of an accelerator, in place of a group."""

ON_HOST = "on the host"
"""The category of memory that is not the accelerator's."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """A collective of this rank, a message between pipeline stages, or a copy between an accelerator and its host.
    Equal ones are different calls."""

    kind: Kind
    nbytes: int
    """Bytes of the whole tensor: the output of an all-gather, else the input."""
    ranks: Ranks
    """The group's ranks, in the world."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self.nbytes if self.kind == "send" else sent_bytes(self.kind, self.nbytes, len(self.ranks))


@dataclass(frozen=True)
class Work:
    """An operation of torch."""

    name: str
    flops: int
    """Floating-point operations of a matrix product or an attention. Others count their bytes alone."""
    nbytes: int
    """Bytes that the operation reads and writes."""
    itemsize: int
    """Bytes of an element of the operation's result."""
    awaits: tuple[Transfer, ...]
    """Collectives whose results the operation is the first to read."""
    is_on_host: bool = False


@dataclass(frozen=True)
class Mark:
    """The begin of a micro-batch, or with pipeline stages of a micro-batch's pass through one stage."""

    stage: int
    is_forward: bool
    micro_batch: int
    """From 0."""


Event = Transfer | Work | Mark


@dataclass
class Block:
    """Memory of one tensor and its views, from its allocation to its release."""

    nbytes: int
    where: str
    """The recorder's place at the allocation."""
    category: str = ""
    """Set by `Recorder.sort_into`. Empty for what neither wrapper nor optimizer holds."""
    collective: Transfer | None = None
    """The last collective that read or wrote the memory."""
    awaited: Transfer | None = None
    """The last collective that wrote the memory, until an operation reads it."""


@dataclass
class Recorder:
    """What a run allocated, computed and sent, in order."""

    where: str = ""
    """What the run is doing, for `Block.where`. Set by the code that follows the run."""
    events: list[tuple[str, Event]] = field(default_factory=list)
    """Events in order, each with its place."""
    live: dict[int, Block] = field(default_factory=dict)
    """Blocks by the address of their storage's object."""
    changes: list[tuple[str, int, Block, int]] = field(default_factory=list)
    """Place, signed bytes, block, and number of earlier events of each allocation and release."""
    uses_host: bool = False
    """Whether any memory is the host's.

    `sort_into` sets it. Without it nobody asks each operation for its memory."""
    _seen: dict[int, Any] = field(default_factory=dict)

    def follow(self, tensor: Tensor) -> bool:
        """Records the memory of a tensor until it is released. Returns False and does nothing where it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return False
        self._seen[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._allocate(key, storage.nbytes())
        return True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records a storage that was freed, or allocated again."""
        key = storage._cdata
        if key in self._seen:
            self._release(key)
            self._allocate(key, storage.nbytes())

    def _allocate(self, key: int, nbytes: int) -> None:
        if nbytes:
            block = self.live[key] = Block(nbytes, self.where)
            self.changes.append((self.where, nbytes, block, len(self.events)))

    def _release(self, key: int) -> None:
        if (block := self.live.pop(key, None)) is not None:
            self.changes.append((self.where, -block.nbytes, block, len(self.events)))

    def _forget(self, key: int) -> None:
        self._seen.pop(key, None)
        self._release(key)

    def sort_into(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Gives a category to the memory of tensors, in place of any earlier one. Memory of the host gets no other one
        than the empty one."""
        self.uses_host |= category == ON_HOST
        for block in self._blocks(tensors):
            if block.category != ON_HOST or not category:
                block.category = category

    def as_host_memory(self, tensor: Tensor) -> Tensor:
        """Sorts the memory of a tensor into the host's. Returns it."""
        self.sort_into(ON_HOST, [tensor])
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        block = None if not self.uses_host or tensor.is_sparse else self.live.get(tensor.untyped_storage()._cdata)
        return block is not None and block.category == ON_HOST

    def send(self, collective: Transfer, tensors: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Adds a collective to the events, and notes it on the memory that it reads and writes."""
        self.events.append((self.where, collective))
        for block in self._blocks(tensors):
            block.collective = collective
        for block in self._blocks(outputs):
            block.awaited = collective

    def read(self, tensors: Iterable[Tensor]) -> tuple[Transfer, ...]:
        """Returns the collectives that wrote tensors and were not waited for."""
        collectives = dict[Transfer, None]()
        for block in self._blocks(tensors):
            if block.awaited is not None:
                collectives[block.awaited], block.awaited = None, None
        return tuple(collectives)

    def _blocks(self, tensors: Iterable[Tensor]) -> Iterator[Block]:
        blocks = (self.live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return (block for block in blocks if block is not None)
