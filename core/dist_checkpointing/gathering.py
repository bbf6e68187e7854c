"""Moves tensors of the whole model between ranks, a bucket at a time, so that no rank holds more than that of them.

Every way out of a sharded model (files of other systems, a trainer's whole state dict, an inference server and its
shards) goes through `move`: from the boxes that ranks hold, elements travel straight into those that others want,
replicas only once, and what a rank holds itself is copied meanwhile. A `TensorStream` makes other systems' tensors of
the wholes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.errors import CheckpointError
from ..comm.collectives import exchange
from .agreement import Ranks, is_of_first_rank
from .global_view import Box, held_boxes, is_copy, overlap

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20
"""Bytes of whole tensors that are gathered together."""


def held_parts(tensor: Tensor) -> dict[Box, Tensor]:
    """Returns the boxes of a whole-model tensor that this rank holds, and a view of the storage of each.

    Args:
        tensor: as `held_boxes` takes it. A copy of another pipeline stage's weight counts as none.
    """
    if is_copy(tensor):
        return {}
    return {(offsets, tuple(part.shape)): part.detach() for offsets, part in held_boxes(tensor) if part.numel()}


def owners_of(boxes: Mapping[int, Mapping[str, Iterable[Box]]]) -> dict[str, dict[Box, list[int]]]:
    """Returns the ranks that hold each box of each tensor, given the boxes by rank and name."""
    owners = dict[str, dict[Box, list[int]]]()
    for rank, held in boxes.items():
        for name, of_rank in held.items():
            of_name = owners.setdefault(name, {})
            for box in of_rank:
                of_name.setdefault(box, []).append(rank)
    return owners


def move(
    names: Sequence[str],
    owners: Mapping[str, Mapping[Box, Sequence[int]]],
    held: Mapping[str, Mapping[Box, Tensor]],
    wanted: Mapping[int, Mapping[str, Iterable[Box]]],
    targets: Mapping[str, Mapping[Box, Tensor]],
    ranks: Ranks,
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int = BUCKET_BYTES,
) -> None:
    """Fills boxes of tensors with what ranks hold of them. Collective. A rank that holds what it wants copies its own.

    Args:
        names: tensors to move together.
        owners: ranks that hold each box, equal on every rank.
        held: this rank's boxes.
        wanted: by rank, the boxes to fill; equal on every rank.
        targets: this rank's boxes to fill; it does not copy its own elements into a tensor that is not in them.
        dtypes: what each tensor travels in.
        limit_bytes: bytes of boxes whose copies, where memory is not contiguous, a rank holds together.
    """
    parts = [((name, box), math.prod(box[1]) * dtypes[name].itemsize) for name in names for box in owners[name]]
    for group in in_buckets(parts, limit_bytes):
        sends, receives = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
        own, arrived = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for name, box in group:
            replicas, packed = owners[name][box], dict[Box, Tensor]()
            for receiver, want in ((rank, want) for rank in wanted for want in wanted[rank].get(name, ())):
                source = receiver if receiver in replicas else replicas[receiver % len(replicas)]
                shared = overlap(box, want) if ranks.rank in (source, receiver) else None
                if shared is None or (source == receiver and name not in targets):
                    continue
                if source == receiver:
                    own.append((targets[name][want][shared[1]], held[name][box][shared[0]]))
                elif source == ranks.rank:
                    if want not in packed:
                        packed[want] = _as_bytes(held[name][box][shared[0]].to(dtypes[name]).contiguous())
                    sends.append((packed[want], receiver))
                else:
                    target = targets[name][want][shared[1]]
                    if not target.is_contiguous():
                        arrived.append((target, torch.empty_like(target, memory_format=torch.contiguous_format)))
                        target = arrived[-1][1]
                    receives.append((_as_bytes(target), source))
        exchange(sends, receives, ranks.group, what=f"parts of {group[0][0]} to {group[-1][0]}", copies=own)
        for target, received in arrived:
            target.copy_(received)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype and shape of a tensor as receivers get it, with the fields of vLLM's class of this name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Outgoing:
    """One tensor that goes out."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """The model's tensors that it is made of. The first one's dtype is its own."""
    make: Callable[[Mapping[str, Tensor]], Tensor]
    """Makes it from these, whole and by name. An `itemgetter` returns one of them as it is."""


class TensorStream:
    """Whole tensors, or what is made of them, as ``(name, tensor)`` pairs in a fixed order, as often as one likes.

    Every rank of the group iterates together. Tensors are whole on receivers, and on the meta device elsewhere.

    Args:
        views: tensors of the whole model by name, as `model_state_dict` returns them; equal names on every rank.
        outgoing: what goes out, in order; None is each of `views` as it is. Tensors of the same sources follow each
            other, and are in one bucket.
        process_group: None means all ranks, or this process alone.
        dtype: what floating-point parameters are rounded to; None keeps each one's. Buffers keep theirs: a rounded
            bias of a router would choose other experts.
        receivers: ranks of the group that get the tensors; None means all.
        bucket_bytes: a bucket of whole tensors closes before it exceeds them. A larger tensor is alone.
    """

    def __init__(
        self,
        views: Mapping[str, Tensor],
        outgoing: Sequence[Outgoing] | None = None,
        process_group: ProcessGroup | None = None,
        *,
        dtype: torch.dtype | None = None,
        receivers: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if outgoing is None:
            outgoing = [Outgoing(name, tuple(view.shape), (name,), itemgetter(name)) for name, view in views.items()]
        # All fixed: what goes out, the tensors that it is made of, and their ranks. Views share the storage of the
        # model's parameters: a later pass reads their values of that time.
        self.outgoing, self.ranks, self.bucket_bytes = outgoing, Ranks(process_group), bucket_bytes
        self.views = {name: views[name] for tensor in outgoing for name in tensor.sources}
        self.receivers = range(self.ranks.size) if receivers is None else sorted(set(receivers))
        self.receives = self.ranks.rank in self.receivers
        kept = {name for name, view in views.items() if is_of_first_rank(view) or not view.dtype.is_floating_point}
        wire = {name: view.dtype if name in kept or dtype is None else dtype for name, view in views.items()}
        self._metadata = {tensor: ParamMeta(tensor.name, wire[tensor.sources[0]], tensor.shape) for tensor in outgoing}
        # What each of the views travels in. Those that are merged are rounded at the end.
        merged = {name for tensor in outgoing for name in tensor.sources if len(tensor.sources) > 1}
        self.dtypes = {name: view.dtype if name in merged else wire[name] for name, view in self.views.items()}
        bundles = [[*of] for _, of in groupby(outgoing, attrgetter("sources"))]
        sized = [(bundle, sum(views[name].nbytes for name in bundle[0].sources)) for bundle in bundles]
        self._buckets = [[*chain(*bundles)] for bundles in in_buckets(sized, bucket_bytes)]

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and shape of each tensor, in order. No communication: any rank may call it alone."""
        return [*self._metadata.values()]

    def bucket_metadata(self) -> list[list[ParamMeta]]:
        """Returns `metadata` of each bucket, without communication."""
        return [[self._metadata[tensor] for tensor in bucket] for bucket in self._buckets]

    @cached_property
    def held(self) -> dict[str, dict[Box, Tensor]]:
        """This rank's boxes of each of the views by name, and views of their storage. Fixed from the first pass on,
        because nothing moves a wrapper's shards."""
        return {name: held_parts(view) for name, view in self.views.items()}

    @cached_property
    def owners(self) -> dict[str, dict[Box, list[int]]]:
        """The ranks that hold each box of each of the views. The first pass communicates for it.

        Of a buffer, which may differ on ranks, the first one counts.

        Raises:
            CheckpointError: on all ranks, if the boxes of a tensor do not make it up.
        """
        owners = owners_of(
            dict(enumerate(self.ranks.all_gather({name: [*parts] for name, parts in self.held.items()})))
        )
        for name, boxes in owners.items():
            if name not in self.views:
                raise CheckpointError(f"only some ranks have {name}; give the same model on every rank")
            have = sum(math.prod(sizes) for _, sizes in boxes)
            if have != self.views[name].numel():
                raise CheckpointError(
                    f"ranks hold {have} elements of {name}, which has {self.views[name].numel()}; give the views "
                    "of one model, and the group of all ranks that hold it"
                )
            if is_of_first_rank(self.views[name]):
                owners[name] = {box: ranks[:1] for box, ranks in boxes.items()}
        return owners

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets():
            yield from bucket

    def buckets(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yields the tensors of each bucket together. A bucket is gathered on all ranks when it is yielded, and each
        of its tensors is made when it is asked for. Its memory is free again when the caller drops both.

        A tensor may be the model's own memory, where this rank holds all of it: do not write to it.
        """
        for bucket in self._buckets:
            yield self._made(bucket, self._gather(list(dict.fromkeys(name for of in bucket for name in of.sources))))

    def _made(self, bucket: Sequence[Outgoing], wholes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for tensor in bucket:
            made = tensor.make(wholes) if self.receives else torch.empty(tensor.shape, device="meta")
            yield tensor.name, made.to(self._metadata[tensor].dtype)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        wholes, targets = dict[str, Tensor](), dict[str, dict[Box, Tensor]]()
        boxes = {name: ((0,) * self.views[name].ndim, tuple(self.views[name].shape)) for name in names}
        for name, box in boxes.items() if self.receives else ():
            if self.ranks.rank in self.owners[name].get(box, ()):
                wholes[name] = self.held[name][box].to(self.dtypes[name])
            else:
                wholes[name] = torch.empty(box[1], dtype=self.dtypes[name], device=self.views[name].device)
                targets[name] = {box: wholes[name]}
        wanted = {rank: {name: [box] for name, box in boxes.items()} for rank in self.receivers}
        move(names, self.owners, self.held, wanted, targets, self.ranks, self.dtypes, self.bucket_bytes)
        return wholes


def in_buckets(items: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Returns items, each given with its size, in lists that end before they exceed a limit. An item that is larger is
    a list of its own."""
    buckets, room = list[list[T]](), 0
    for item, size in items:
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(item)
        room -= size
    return buckets
