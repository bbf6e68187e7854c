"""Computes where a unit is cut between ranks: at elements, blocks, rows or tensors. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..fully_sharded_data_parallel_config import ShardCut
from .layout import HIGH_BUSBW_ALIGNMENT, PARAM_ALIGNMENT, BucketLayout, round_up
from .values import Cut

_MOST_PADDING = 0.01
"""Share of padding, beyond that of ``flat``, below which ``auto`` cuts by rows."""

Shape = Sequence[int]


def lay_out_unit(
    shapes: Sequence[Shape], num_shards: int, cut: ShardCut, *, for_high_busbw: bool = False
) -> tuple[BucketLayout, Cut]:
    """Places parameters of these shapes in a bucket of `num_shards` equal parts; returns its layout and its cut.

    Every parameter starts at a multiple of `PARAM_ALIGNMENT`, so that a layer may compute its gradient there.

    Args:
        cut: ``auto`` is ``rows`` where that pads by less than 1 % more than ``flat``, else ``flat``.
    """
    alignment = math.lcm(num_shards * PARAM_ALIGNMENT, HIGH_BUSBW_ALIGNMENT if for_high_busbw else 1) // num_shards
    flat = _by_grains(shapes, num_shards, alignment, ShardCut("flat"))
    if num_shards == 1:
        return flat, "whole"
    if cut.kind == "tensor":
        return _by_tensors(shapes, num_shards, alignment), "tensor"
    if cut.kind != "auto":
        return _by_grains(shapes, num_shards, alignment, cut), cut.kind
    rows = _by_grains(shapes, num_shards, alignment, ShardCut("rows"))
    return (rows, "rows") if rows.end - flat.end < _MOST_PADDING * flat.end else (flat, "flat")


def _grain(shape: Shape, cut: ShardCut) -> int:
    """Returns the number of elements that are never split between ranks."""
    if cut.kind == "rows":
        return max(1, math.prod(shape[1:]))
    return cut.block


def _by_grains(shapes: Sequence[Shape], num_shards: int, alignment: int, cut: ShardCut) -> BucketLayout:
    """Places parameters in sequence, largest grain first; parameters and shards start at multiples of the grain.

    So the end of a shard is a whole number of grains away from the start of the parameter that it is in.
    """
    grains = [_grain(shape, cut) for shape in shapes]
    length = math.lcm(alignment, *grains)
    members = sorted(range(len(shapes)), key=lambda index: -grains[index])
    ranges, end = [], 0
    for index in members:
        start = round_up(end, math.lcm(PARAM_ALIGNMENT, grains[index]))
        end = start + math.prod(shapes[index])
        ranges.append((start, end))
    return BucketLayout(0, round_up(end, num_shards * length), tuple(members), tuple(ranges))


def _by_tensors(shapes: Sequence[Shape], num_shards: int, alignment: int) -> BucketLayout:
    """Returns each parameter whole in one shard: the largest first, each to the shard that has least (Graham,
    1969)."""
    sizes = [math.prod(shape) for shape in shapes]
    filled = [0] * num_shards
    place: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(shapes)), key=lambda index: -sizes[index]):
        shard = filled.index(min(filled))
        place[index] = shard, filled[shard]
        filled[shard] += round_up(sizes[index], PARAM_ALIGNMENT)
    length = round_up(max(filled), alignment)
    members = sorted(place, key=lambda index: place[index])
    starts = [place[index][0] * length + place[index][1] for index in members]
    ranges = tuple((start, start + sizes[index]) for index, start in zip(members, starts, strict=True))
    return BucketLayout(0, num_shards * length, tuple(members), ranges)
