"""Moves tensors of the whole model between ranks, a bucket at a time, so that no rank holds more than a bucket whole.

Every way out of a sharded model (files of other systems, a trainer's whole state dict, an inference server and its
shards) goes through `plan_transfers` and `move`: from the boxes that ranks hold, elements travel straight into those
that others want, replicas only once, and what a rank holds itself is copied meanwhile. A `TensorStream` makes other
systems' tensors of the wholes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.errors import CheckpointError
from ..base.host_memory import LentMemory
from ..comm.collectives import exchange
from ..comm.messages import as_message
from .agreement import Ranks, held_parts, is_of_first_rank
from .global_view import Box, can_be_cast, overlap

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20
"""Bytes of whole tensors that are gathered together."""


def owners_of(boxes: Mapping[int, Mapping[str, Iterable[Box]]]) -> dict[str, dict[Box, list[int]]]:
    """Returns the ranks that hold each box of each tensor, given the boxes by rank and name."""
    owners = dict[str, dict[Box, list[int]]]()
    for rank, held in boxes.items():
        for name, of_rank in held.items():
            of_name = owners.setdefault(name, {})
            for box in of_rank:
                of_name.setdefault(box, []).append(rank)
    return owners


class Transfer(NamedTuple):
    """Elements of one tensor that a rank sends, receives, or copies itself."""

    name: str
    box: Box
    """The source's box, which holds the elements."""
    cut: tuple[slice, ...]
    """Place of the elements in `box`."""
    want: Box
    """The receiver's box, which the elements go to."""
    place: tuple[slice, ...]
    """Place of the elements in `want`."""
    source: int
    receiver: int


def plan_transfers(
    names: Sequence[str],
    owners: Mapping[str, Mapping[Box, Sequence[int]]],
    wanted: Mapping[int, Mapping[str, Iterable[Box]]],
    rank: int,
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int = BUCKET_BYTES,
) -> list[tuple[str, list[Transfer]]]:
    """Returns what one rank does to fill boxes of tensors with what ranks hold of them, in groups that `move` takes.

    A rank that holds what it wants copies its own.

    Args:
        names: tensors to move together.
        owners: ranks that hold each box, equal on every rank.
        wanted: by rank, the boxes to fill; equal on every rank.
        dtypes: what each tensor travels in.
        limit_bytes: bytes of boxes whose copies, where memory is not contiguous, a rank holds together.

    Returns:
        of each group its name in messages and its transfers. Groups are equally many on all ranks.
    """
    parts = [((name, box), math.prod(box[1]) * dtypes[name].itemsize) for name in names for box in owners[name]]
    planned = list[tuple[str, list[Transfer]]]()
    for group in in_buckets(parts, limit_bytes):
        transfers = list[Transfer]()
        for name, box in group:
            replicas = owners[name][box]
            for receiver, want in ((to, want) for to in wanted for want in wanted[to].get(name, ())):
                source = receiver if receiver in replicas else replicas[receiver % len(replicas)]
                shared = overlap(box, want) if rank in (source, receiver) else None
                if shared is not None:
                    transfers.append(Transfer(name, box, shared[0], want, shared[1], source, receiver))
        planned.append((f"parts of {group[0][0]} to {group[-1][0]}", transfers))
    return planned


def move(
    planned: Iterable[tuple[str, Iterable[Transfer]]],
    held: Mapping[str, Mapping[Box, Tensor]],
    targets: Mapping[str, Mapping[Box, Tensor]],
    ranks: Ranks,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Carries out what `plan_transfers` has planned. Collective.

    Args:
        held: this rank's boxes.
        targets: this rank's boxes to fill; it does not copy its own elements into a tensor that is not in them.
    """
    for what, transfers in planned:
        sends, receives = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
        own = list[tuple[Tensor, Tensor]]()
        packed = dict[tuple[str, Box, Box], Tensor]()
        for name, box, cut, want, place, source, receiver in transfers:
            if receiver != ranks.rank:
                if (name, box, want) not in packed:
                    packed[name, box, want] = as_message(held[name][box][cut].to(dtypes[name]))
                sends.append((packed[name, box, want], receiver))
            elif source != ranks.rank:
                receives.append((targets[name][want][place], source))
            elif name in targets:
                own.append((targets[name][want][place], held[name][box][cut]))
        exchange(sends, receives, ranks.group, what=what, copies=own)
        # Torch counts no message as a write, by which a wrapper knows that its shards have changed.
        torch.autograd.graph.increment_version([into for into, _ in receives if not into.is_inference()])


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
    """Names of the model's tensors that the outgoing one is made of. It has the dtype of the first."""
    make: Callable[[Mapping[str, Tensor]], Tensor]
    """Makes the outgoing tensor from `sources`, whole and by name. An `itemgetter` returns one of them as it is."""


class TensorStream:
    """Whole tensors, or what is made of them, as ``(name, tensor)`` pairs in a fixed order, as often as one likes.

    Every rank of the group iterates together. Tensors are whole on receivers, and on the meta device elsewhere.

    Args:
        views: tensors of the whole model by name, as `model_state_dict` returns them; equal names on every rank.
        outgoing: what goes out, in order; None is each of `views` as it is. Tensors of the same sources follow each
            other, and are in one bucket.
        process_group: None means all ranks, or this process alone.
        dtype: what floating-point parameters are rounded to; None keeps each one's. Buffers keep theirs: a rounded
            bias of a router would choose other experts. So do packed codes, which are no numbers.
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
        cast = {name for name, v in views.items() if dtype and can_be_cast(dtype, v) and not is_of_first_rank(v)}
        wire = {name: dtype if dtype and name in cast else view.dtype for name, view in views.items()}
        self._metadata = {tensor: ParamMeta(tensor.name, wire[tensor.sources[0]], tensor.shape) for tensor in outgoing}
        # What each of the views travels in. Those that are merged are rounded at the end.
        merged = {name for tensor in outgoing for name in tensor.sources if len(tensor.sources) > 1}
        self.dtypes = {name: view.dtype if name in merged else wire[name] for name, view in self.views.items()}
        bundles = [[*of] for _, of in groupby(outgoing, attrgetter("sources"))]
        sized = [(bundle, sum(views[name].nbytes for name in bundle[0].sources)) for bundle in bundles]
        self._buckets = [[*chain(*bundles)] for bundles in in_buckets(sized, bucket_bytes)]
        # Memory of whole tensors that are not the model's own, a bucket's next to the last tensor of the one before,
        # which the caller may still have; `_gather` takes it.
        sizes = [size for _, size in sized]
        largest = max((size for size in sizes if size <= bucket_bytes), default=0)
        self._memory = LentMemory(min(bucket_bytes + largest, sum(sizes)))

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and shape of each tensor, in order. No communication: any rank may call it alone."""
        return [*self._metadata.values()]

    def bucket_metadata(self) -> list[list[ParamMeta]]:
        """Returns `metadata` of each bucket, without communication."""
        return [[self._metadata[tensor] for tensor in bucket] for bucket in self._buckets]

    @cached_property
    def held(self) -> dict[str, dict[Box, Tensor]]:
        """This rank's boxes of each of the views by name, and views of their storage. The boxes are fixed from the
        first pass on, because nothing moves a wrapper's shards."""
        return {name: held_parts(view) for name, view in self.views.items()}

    @cached_property
    def owners(self) -> dict[str, dict[Box, list[int]]]:
        """The ranks that hold each box of each view. The first pass communicates to find them.

        For a buffer, whose values may differ between ranks, the first rank counts.

        Raises:
            CheckpointError: on all ranks, if the boxes of a tensor do not make it up.
        """
        boxes_of_ranks = self.ranks.all_gather({name: [*parts] for name, parts in self.held.items()})
        owners = owners_of(dict(enumerate(boxes_of_ranks)))
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
        of its tensors is made when it is asked for. When the caller drops both, the next buckets use its memory again.

        A tensor may be the model's own memory, where this rank holds all of it: do not write to it.
        """
        for bucket, planned in zip(self._buckets, self._transfers, strict=True):
            yield self._made(bucket, self._gather(_sources(bucket), planned))

    @cached_property
    def _transfers(self) -> list[list[tuple[str, list[Transfer]]]]:
        """What this rank does for each bucket. Fixed from the first pass on, as `held` is."""
        wanted = {rank: {name: [_whole(view)] for name, view in self.views.items()} for rank in self.receivers}
        fixed = self.owners, wanted, self.ranks.rank, self.dtypes, self.bucket_bytes
        return [plan_transfers(_sources(bucket), *fixed) for bucket in self._buckets]

    def _made(self, bucket: Sequence[Outgoing], wholes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for tensor in bucket:
            made = tensor.make(wholes) if self.receives else torch.empty(tensor.shape, device="meta")
            yield tensor.name, made.to(self._metadata[tensor].dtype)

    def _gather(self, names: Iterable[str], planned: Iterable[tuple[str, Iterable[Transfer]]]) -> dict[str, Tensor]:
        wholes, targets = dict[str, Tensor](), dict[str, dict[Box, Tensor]]()
        for name in names if self.receives else ():
            box, view, dtype = _whole(self.views[name]), self.views[name], self.dtypes[name]
            if self.ranks.rank in self.owners[name].get(box, ()):
                wholes[name] = self.held[name][box].to(dtype)
            else:
                wholes[name] = self._memory.take(view.shape, dtype, view.device)
                targets[name] = {box: wholes[name]}
        move(planned, self.held, targets, self.ranks, self.dtypes)
        return wholes


def _sources(bucket: Iterable[Outgoing]) -> list[str]:
    return list(dict.fromkeys(name for tensor in bucket for name in tensor.sources))


def _whole(view: Tensor) -> Box:
    return (0,) * view.ndim, tuple(view.shape)


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
