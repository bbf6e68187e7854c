"""Sends weights from the shards of a trainer straight into the shards of receivers, without a gather.

Ranks say at each call which boxes of each tensor they have, or want. Where two overlap, the elements travel from the
one to the other, in the dtype of the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import ConfigError, WeightsError
from ..comm.collectives import exchange
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.flat_range import Box, held_boxes
from .stream import WeightStream


@dataclass
class _Side:
    """What one rank has, or wants."""

    is_receiver: bool
    metas: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of each tensor, by name, in the order of exchange."""
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    buckets: list[list[str]] = field(default_factory=list)


def send_shards(stream: WeightStream, group: ProcessGroup) -> None:
    """Sends a stream's weights into the shards of the receivers in `group`, which call `receive_shards`.

    Args:
        stream: its trainer ranks all call this. It has the model's own tensors under any names: none that is cut out
            of another one or merged.
        group: the trainer's ranks and the receivers, at least one of each.

    Raises:
        ConfigError: the stream makes tensors out of others.
        WeightsError: on all ranks, before the first byte: a receiver wants something else.
        ShardstackError: a step has begun.
    """
    made = [tensor.name for tensor in stream.outgoing if not isinstance(tensor.make, itemgetter)]
    if made:
        raise ConfigError(
            f"shards of {made[0]} were asked for, which is made out of other tensors; use WeightStream(names='module')"
        )
    stream.check_between_steps()
    held, side = dict[str, list[tuple[Box, Tensor]]](), _Side(False, buckets=stream.bucket_names())
    for tensor, meta in zip(stream.outgoing, stream.metadata(), strict=True):
        boxes = held_boxes(stream.tensors.views[tensor.sources[0]])
        held[meta.name] = [((tuple(offsets), tuple(piece.shape)), piece.detach()) for offsets, piece in boxes]
        side.metas[meta.name] = dtype_name(meta.dtype), meta.shape
        side.boxes[meta.name] = [box for box, _ in held[meta.name]]
    _exchange_all(side, held, group)


def receive_shards(targets: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Fills tensors, or the shards of them that this rank has, with a trainer's weights, in place.

    Args:
        targets: tensors by the stream's names, as `model_state_dict` returns them: plain ones are whole, and of a
            sharded one each rank gets its own part.
        group: as of `send_shards`.

    Raises:
        WeightsError: on all ranks, before the first byte: a name, shape or dtype is not that of the stream.
    """
    held = {
        name: [((tuple(offsets), tuple(piece.shape)), piece) for offsets, piece in held_boxes(target.detach())]
        for name, target in targets.items()
    }
    metas = {name: (dtype_name(target.dtype), tuple(target.shape)) for name, target in targets.items()}
    _exchange_all(_Side(True, metas, {name: [box for box, _ in boxes] for name, boxes in held.items()}), held, group)


def _exchange_all(own: _Side, held: Mapping[str, Sequence[tuple[Box, Tensor]]], group: ProcessGroup) -> None:
    ranks = Ranks(group)
    sides = ranks.all_gather(own)
    senders = [rank for rank, side in enumerate(sides) if not side.is_receiver]
    receivers = [rank for rank, side in enumerate(sides) if side.is_receiver]
    if not senders or not receivers:
        raise WeightsError(f"shards need senders and receivers in one group, which has {len(senders)} senders")
    metas = sides[senders[0]].metas
    for rank in receivers:
        for name, meta in sides[rank].metas.items():
            if metas.get(name) != meta:
                raise WeightsError(f"rank {rank} wants {name} as {meta}, and it is sent as {metas.get(name)}")
    for names in sides[senders[0]].buckets:
        sends, receives, copies = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), list[tuple[Tensor, Tensor]]()
        for name in names:
            pieces = dict(held.get(name, ()))
            owners: dict[Box, list[int]] = {}
            for rank in senders:
                for box in sides[rank].boxes[name]:
                    owners.setdefault(box, []).append(rank)
            wishes = [(receiver, box) for receiver in receivers for box in sides[receiver].boxes.get(name, ())]
            for (receiver, wanted), (box, replicas) in itertools.product(wishes, owners.items()):
                source, common = replicas[receiver % len(replicas)], _overlap(box, wanted)
                if common is None or ranks.rank not in (source, receiver):
                    continue
                if ranks.rank == source:
                    part = pieces[box][_within(common, box)].to(DTYPES[metas[name][0]]).contiguous()
                    sends.append((part.view(-1).view(torch.uint8), receiver))
                else:
                    target = pieces[wanted][_within(common, wanted)]
                    copies.append((target, torch.empty_like(target, memory_format=torch.contiguous_format)))
                    receives.append((copies[-1][1].view(-1).view(torch.uint8), source))
        exchange(sends, receives, group, what=f"shards of {names[0]} to {names[-1]}")
        for target, received in copies:
            target.copy_(received)


def _overlap(first: Box, second: Box) -> Box | None:
    bounds = [(max(a, b), min(a + size, b + other)) for a, size, b, other in zip(*first, *second, strict=True)]
    if any(start >= end for start, end in bounds):
        return None
    return tuple(start for start, _ in bounds), tuple(end - start for start, end in bounds)


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    """Returns the place of a part in the tensor of its box."""
    places = [(start - offset, size) for start, size, offset in zip(*part, box[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in places)
