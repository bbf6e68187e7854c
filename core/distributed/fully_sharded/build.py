"""Builds the units of a plan, and the slots that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from ...comm.collectives import Allocate
from ...host_memory import transient_memory
from ..groups import subgroup
from ..plan import Plan
from .memory import ShardedBuffer
from .piece import Piece
from .unit import Slot, Unit


def build_units(
    plan: Plan,
    buffers: Sequence[ShardedBuffer],
    params: Mapping[str, nn.Parameter],
    allocate: Allocate = transient_memory,
) -> list[Unit]:
    """Builds the units of a plan, and the slots that they share.

    Args:
        buffers: of the plan's, in their order.
        params: the model's, by name.
        allocate: of the slots' memory.
    """
    slots: dict[int, Slot] = {}
    neighbours = _groups_of_neighbours(plan)
    units = []
    for planned in plan.units:
        kept = [buffers[index] for index, _ in planned.buckets]
        buckets = [bucket for _, bucket in plan.buckets_of(planned)]
        slot: Slot | None = None
        if planned.slot is not None:
            sizes = [
                (bucket.elements, buffer.gathered_dtype, buffer.device)
                for bucket, buffer in zip(buckets, kept, strict=True)
            ]
            if planned.slot not in slots:
                slots[planned.slot] = Slot(sizes, allocate)
            slot = slots[planned.slot]
        shards = [buffer.shard_of(bucket) for bucket, buffer in zip(buckets, kept, strict=True)]
        pieces = [
            Piece(
                [params[param.name] for param in bucket.params],
                [param.name for param in bucket.params],
                bucket.layout.ranges,
                shard,
                whole,
            )
            for bucket, shard, whole in zip(buckets, shards, shards if slot is None else slot.parts, strict=True)
        ]
        group, name = plan.groups.shard, " + ".join(planned.names) or "of the model itself"
        units.append(Unit(name, slot, pieces, group, neighbours.get(planned.kept_among)))
    return units


def _groups_of_neighbours(plan: Plan) -> dict[int | None, ProcessGroup]:
    """Makes the group of this rank for each number of neighbours that units are kept among; every rank calls it."""
    group, made = plan.groups.shard, dict[int | None, ProcessGroup]()
    for size in sorted({unit.kept_among for unit in plan.units if unit.kept_among is not None}):
        first = group.rank() // size * size
        made[size] = subgroup(group, range(first, first + size))
    return made
