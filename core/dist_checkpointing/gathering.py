"""Gathers tensors of the whole model a bucket at a time, so that no rank holds more than a bucket of them.

Every way out of a sharded model (files of other systems, a trainer's whole state dict, an inference server) reads it
here. A rank that holds all of a tensor receives nothing. Pieces travel straight from a rank that holds them into the
whole tensor of each rank that wants it, replicas of a piece only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.errors import CheckpointError
from ..comm.collectives import exchange
from .agreement import Ranks
from .flat_range import Box, held_boxes
from .format.writer import is_of_first_rank

BUCKET_BYTES = 64 * 2**20
"""Bytes of whole tensors that are gathered together."""


@dataclass(frozen=True)
class Part:
    """A box of a whole tensor, or several that follow each other in its memory."""

    offsets: tuple[int, ...]
    """First index of the box, or of a run of elements ``(start,)`` in the flattened tensor."""
    sizes: tuple[int, ...]
    is_run: bool
    """The elements are contiguous in the whole tensor."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, whole: Tensor) -> Tensor:
        """Returns the view of a contiguous whole tensor."""
        if self.is_run:
            return whole.view(-1)[self.offsets[0] : self.offsets[0] + self.sizes[0]]
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))]


def held_parts(tensor: Tensor) -> list[tuple[Part, Tensor]]:
    """Returns the parts of a whole-model tensor that this rank holds, and a view of the storage of each.

    Args:
        tensor: as `held_boxes` takes it.
    """
    parts: list[tuple[Part, Tensor]] = []
    for offsets, piece in held_boxes(tensor):
        if not piece.numel():
            continue
        part = _part(tensor.shape, (tuple(offsets), tuple(piece.shape)))
        values = piece.reshape(-1) if part.is_run else piece
        if parts and part.is_run and _follows(parts[-1], part, values):
            before, first = parts.pop()
            part = Part(before.offsets, (before.numel + part.numel,), True)
            values = first.as_strided((part.numel,), (1,))
        parts.append((part, values))
    return parts


def _follows(last: tuple[Part, Tensor], part: Part, values: Tensor) -> bool:
    """Returns whether a run begins where the last one ends, in the whole tensor and in this rank's memory."""
    before, held = last
    end = held.data_ptr() + before.numel * held.element_size()
    return before.is_run and before.offsets[0] + before.numel == part.offsets[0] and end == values.data_ptr()


def _part(shape: Sequence[int], box: Box) -> Part:
    """Returns a box as a run of elements where it is one."""
    offsets, sizes = box
    cut = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if tuple(sizes[cut + 1 :]) != tuple(shape[cut + 1 :]):
        return Part(offsets, sizes, False)
    start = 0
    for offset, size in zip(offsets, shape, strict=True):
        start = start * size + offset
    return Part((start,), (math.prod(sizes),), True)


@dataclass(frozen=True)
class _Transfer:
    name: str
    part: Part
    source: int
    """The rank that sends."""
    receiver: int


class WholeTensors:
    """Whole tensors on the ranks that receive them, a bucket at a time. Every rank of the group iterates together.

    Args:
        views: tensors of the whole model by name, as `model_state_dict` returns them; equal names on every rank.
        group: None means all ranks, or this process alone.
        receivers: ranks of the group that get the tensors; None means all.
        bucket_bytes: a bucket closes before it exceeds them. A larger bundle is a bucket of its own.
        bundles: names that stay in one bucket, in the order of the buckets; None takes each name alone.
    """

    def __init__(
        self,
        views: Mapping[str, Tensor],
        group: ProcessGroup | None = None,
        *,
        receivers: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        bundles: Sequence[Sequence[str]] | None = None,
    ) -> None:
        # Fixed. Views share the storage of the model's parameters: a later pass reads their values of that time.
        self.views, self.ranks, self.bucket_bytes = views, Ranks(group), bucket_bytes
        self.receivers = range(self.ranks.size) if receivers is None else sorted(set(receivers))
        self.bundles = [[name] for name in views] if bundles is None else bundles
        # The parts of each tensor by name, and the ranks with each. The first pass sets it, by communication; fixed
        # from then on, because nothing moves a wrapper's shards.
        self._owners: dict[str, dict[Part, list[int]]] | None = None
        # This rank's parts of each tensor, and views of their storage. Set with `_owners`.
        self.held: dict[str, dict[Part, Tensor]] = {}

    @property
    def receives(self) -> bool:
        """Whether this rank gets the tensors."""
        return self.ranks.rank in self.receivers

    def owners(self) -> dict[str, dict[Part, list[int]]]:
        """Returns the ranks that hold each part of each tensor. Communicates at the first call.

        Raises:
            CheckpointError: on all ranks, if the parts of a tensor do not make it up.
        """
        if self._owners is None:
            self.held = {name: dict(held_parts(view)) for name, view in self.views.items()}
            own = {name: [*parts] for name, parts in self.held.items()}
            owners: dict[str, dict[Part, list[int]]] = {name: {} for name in self.views}
            for rank, held in enumerate(self.ranks.all_gather(own)):
                for name, parts in held.items():
                    for part in parts:
                        owners.setdefault(name, {}).setdefault(part, []).append(rank)
            for name, parts_of in owners.items():
                have = sum(part.numel for part in parts_of)
                if name not in self.views or have != self.views[name].numel():
                    raise CheckpointError(
                        f"ranks hold {have} elements of {name}, which has {self.views[name].numel()}; give the views "
                        "of one model, and the group of all ranks that hold it"
                        if name in self.views
                        else f"only some ranks have {name}; give the same model on every rank"
                    )
            self._owners = owners
        return self._owners

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each bucket by name: whole ones on receivers, tensors on the meta device elsewhere.

        A whole tensor is the model's own memory where this rank holds all of it: do not write to it. A bucket is
        gathered on all ranks when it is yielded, and its memory is free again when the caller drops it.
        """
        for names in self.bucket_names():
            yield self._gather(names)

    def bucket_names(self) -> list[list[str]]:
        """Returns the names of each bucket."""
        buckets: list[list[str]] = []
        room = 0
        for bundle in self.bundles:
            num_bytes = sum(self.views[name].numel() * self.views[name].element_size() for name in bundle)
            if not buckets or num_bytes > room:
                buckets.append([])
                room = self.bucket_bytes
            buckets[-1] += bundle
            room -= num_bytes
        return buckets

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        owners = self.owners()
        wholes = {name: self._begin(self.views[name], self.held[name]) for name in names}
        transfers = [
            _Transfer(name, part, source, receiver)
            for name in names
            for receiver in self.receivers
            for part, ranks in owners[name].items()
            if (source := self._source(name, ranks, receiver)) != receiver
        ]
        for group in self._within_memory(transfers):
            self._exchange(group, wholes)
        return wholes

    def _source(self, name: str, ranks: Sequence[int], receiver: int) -> int:
        """Returns the rank whose values of a part the receiver takes: its own, but for buffers, which may differ."""
        if is_of_first_rank(self.views[name]):
            return ranks[0]
        return receiver if receiver in ranks else ranks[receiver % len(ranks)]

    def _begin(self, view: Tensor, pieces: Mapping[Part, Tensor]) -> Tensor:
        """Returns the whole tensor with this rank's pieces."""
        if not self.receives:
            return torch.empty(view.shape, dtype=view.dtype, device="meta")
        if sum(part.numel for part in pieces) == view.numel() and len(pieces) == 1 and not is_of_first_rank(view):
            return next(iter(pieces.values())).view(view.shape)
        whole = torch.empty(view.shape, dtype=view.dtype, device=view.device)
        for part, piece in pieces.items():
            part.of(whole).copy_(piece)
        return whole

    def _within_memory(self, transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
        """Yields groups of transfers whose copies together take at most a bucket's memory, or one transfer."""
        group: list[_Transfer] = []
        copied = 0
        for transfer in transfers:
            num_bytes = 0 if transfer.part.is_run else transfer.part.numel * self.views[transfer.name].element_size()
            if group and copied + num_bytes > self.bucket_bytes:
                yield group
                group, copied = [], 0
            group.append(transfer)
            copied += num_bytes
        if group:
            yield group

    def _exchange(self, transfers: Sequence[_Transfer], wholes: Mapping[str, Tensor]) -> None:
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for transfer in transfers:
            if transfer.source == self.ranks.rank:
                sends.append((_as_bytes(self.held[transfer.name][transfer.part].contiguous()), transfer.receiver))
            elif transfer.receiver == self.ranks.rank:
                target = transfer.part.of(wholes[transfer.name])
                if not transfer.part.is_run:
                    copies.append((target, torch.empty_like(target, memory_format=torch.contiguous_format)))
                    target = copies[-1][1]
                receives.append((_as_bytes(target), transfer.source))
        exchange(sends, receives, self.ranks.group, what=f"whole tensors {transfers[0].name} to {transfers[-1].name}")
        for target, received in copies:
            target.copy_(received)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def gather_whole(
    views: Mapping[str, Tensor], group: ProcessGroup | None = None, *, receivers: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor by name, whole on receivers. See `WholeTensors`, which has more settings."""
    for bucket in WholeTensors(views, group, receivers=receivers).buckets():
        for name in list(bucket):
            yield name, bucket.pop(name)
