"""Places parameters in a flat buffer, cuts it into buckets, and buckets between ranks: arithmetic, no memory.

A bucket is cut between ranks at elements, blocks, rows or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..fully_sharded_data_parallel_config import ShardCut

PARAM_ALIGNMENT = 64
"""Elements. Where buckets are cut, and where a layer computes its gradient in the buffer, a parameter starts at a
multiple of it."""


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: elements ``[start, end)`` of the buffer, padding included, and its parameters' places in it."""

    start: int
    end: int
    members: tuple[int, ...]
    """Indices of the bucket's parameters, in the order of their places."""
    ranges: tuple[tuple[int, int], ...]
    """``[start, end)`` of each member, counted from the beginning of the bucket."""

    def bounds(self, member: tuple[int, int], num_parts: int) -> tuple[int, ...]:
        """Returns where equal parts of the bucket cut the parameter in one of `ranges`: see `ParamPlan.bounds`."""
        (start, end), length = member, (self.end - self.start) // num_parts
        return (0, *(min(max(length * part, start), end) - start for part in range(1, num_parts)), end - start)


FullParamLayout = tuple[tuple[BucketLayout, ...], ...]
"""The places of a model's parameters in flat buffers, which need not exist yet: the buckets of each buffer."""


def default_bucket_size(dp_size: int) -> int:
    """Returns elements, as in Megatron-LM: messages large enough for the network also when many ranks share them."""
    return max(40_000_000, 1_000_000 * dp_size)


def lay_out(
    sizes: Sequence[int],
    *,
    dp_size: int | None,
    bucket_size: int | None = None,
    alone: Collection[int] = (),
    aligned: Collection[int] = (),
    grain: int = PARAM_ALIGNMENT,
) -> list[BucketLayout]:
    """Cuts parameters of `sizes` elements, in this order, into buckets of whole parameters.

    A bucket closes as soon as its parameters have `bucket_size` elements, without padding, so that buckets are the
    same under every strategy. Where buckets are cut, the length of each is a multiple of `dp_size`
    times `PARAM_ALIGNMENT`, so that shards are equal and aligned; else parameters follow without gaps, as in
    Megatron-LM, up to the next one of `aligned`.

    Args:
        sizes: elements of each parameter.
        dp_size: ranks that a bucket may be cut over; None where none is.
        bucket_size: elements; None means one bucket.
        alone: indices of parameters that have a bucket of their own.
        aligned: indices of parameters whose gradient a layer computes in the buffer: a matrix product is slower, and
            rounds differently, in memory that is not aligned.
        grain: elements. Where buckets are cut, a multiple of it is, and parameters that are multiples start at such.
    """
    multiple = dp_size * grain if dp_size else 1
    layouts: list[BucketLayout] = []
    start, members, ranges = 0, list[int](), list[tuple[int, int]]()
    for index, size in enumerate(sizes):
        begin = ranges[-1][1] if ranges else 0
        if dp_size or index in aligned:
            begin = round_up(start + begin, PARAM_ALIGNMENT) - start
        members.append(index)
        ranges.append((begin, begin + size))
        is_full = bucket_size is not None and sum(sizes[i] for i in members) >= bucket_size
        if is_full or index in alone or index + 1 in alone or index == len(sizes) - 1:
            end = start + round_up(begin + size, multiple)
            layouts.append(BucketLayout(start, end, tuple(members), tuple(ranges)))
            start, members, ranges = end, [], []
    return layouts


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


_MOST_PADDING = 0.01
"""Share of padding, beyond that of ``flat``, below which ``auto`` cuts by rows."""

Shape = Sequence[int]


def lay_out_unit(
    shapes: Sequence[Shape], num_shards: int, cut: ShardCut, grain: int = PARAM_ALIGNMENT
) -> BucketLayout:
    """Places parameters of these shapes in a bucket of `num_shards` equal parts.

    Every parameter starts at a multiple of `PARAM_ALIGNMENT`, so that a layer may compute its gradient there.

    Args:
        cut: ``auto`` is ``rows`` where that pads by less than 1 % more than ``flat``, else ``flat``.
        grain: elements that ``flat`` does not split, a multiple of `PARAM_ALIGNMENT`.
    """
    flat = _by_grains(shapes, num_shards, ShardCut("flat", grain))
    if num_shards == 1:
        return flat
    if cut.kind == "tensor":
        return _by_tensors(shapes, num_shards)
    if cut.kind != "auto":
        return _by_grains(shapes, num_shards, cut)
    rows = _by_grains(shapes, num_shards, ShardCut("rows"))
    return rows if rows.end - flat.end < _MOST_PADDING * flat.end else flat


def _by_grains(shapes: Sequence[Shape], num_shards: int, cut: ShardCut) -> BucketLayout:
    """Places parameters in sequence, largest grain first. Parameters and shards start at multiples of the grain.

    So the end of a shard is a whole number of grains away from the start of the parameter that it is in.
    """
    # Elements that are never split between ranks.
    grains = [max(1, math.prod(shape[1:])) if cut.kind == "rows" else cut.block for shape in shapes]
    length = math.lcm(PARAM_ALIGNMENT, *grains)
    members = sorted(range(len(shapes)), key=lambda index: -grains[index])
    ranges, end = [], 0
    for index in members:
        start = round_up(end, math.lcm(PARAM_ALIGNMENT, grains[index]))
        end = start + math.prod(shapes[index])
        ranges.append((start, end))
    return BucketLayout(0, round_up(end, num_shards * length), tuple(members), tuple(ranges))


def _by_tensors(shapes: Sequence[Shape], num_shards: int) -> BucketLayout:
    """Returns each parameter whole in one shard: the largest first, each to the shard that has least (Graham,
    1969)."""
    sizes = [math.prod(shape) for shape in shapes]
    filled = [0] * num_shards
    place: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(shapes)), key=lambda index: -sizes[index]):
        shard = filled.index(min(filled))
        place[index] = shard, filled[shard]
        filled[shard] += round_up(sizes[index], PARAM_ALIGNMENT)
    length = round_up(max(filled), PARAM_ALIGNMENT)
    members = sorted(place, key=lambda index: place[index])
    starts = [place[index][0] * length + place[index][1] for index in members]
    ranges = tuple((start, start + sizes[index]) for index, start in zip(members, starts, strict=True))
    return BucketLayout(0, num_shards * length, tuple(members), ranges)
