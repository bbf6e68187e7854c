"""Places parameters in a flat buffer, and cuts it into buckets: arithmetic, no memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 64
"""Elements; where buckets are cut, and where a layer computes its gradient in the buffer, a parameter starts at a
multiple of it."""

HIGH_BUSBW_ALIGNMENT = 2**16
"""Elements; NCCL's rings reach their full bandwidth where message sizes divide by a large power of two."""


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: elements ``[start, end)`` of the buffer, padding included, and its parameters' places in it."""

    start: int
    end: int
    members: tuple[int, ...]
    """Indices of its parameters, in the order of their places."""
    ranges: tuple[tuple[int, int], ...]
    """``[start, end)`` of each member, counted from the beginning of the bucket."""


def default_bucket_size(dp_size: int) -> int:
    """Returns elements, as in Megatron-LM: messages large enough for the network also when many ranks share them."""
    return max(40_000_000, 1_000_000 * dp_size)


def lay_out(
    sizes: Sequence[int],
    *,
    dp_size: int | None,
    bucket_size: int | None = None,
    num_buckets: int | None = None,
    for_high_busbw: bool = False,
    alone: Collection[int] = (),
    aligned: Collection[int] = (),
) -> list[BucketLayout]:
    """Cuts parameters of `sizes` elements, in this order, into buckets of whole parameters.

    A bucket closes as soon as its parameters have `bucket_size` elements, without padding, so that buckets are the
    same under every strategy; with `num_buckets` as soon as it reaches its equal part of the whole, which gives fewer
    where single parameters are larger than that. Where buckets are cut, the length of each is a multiple of `dp_size`
    times `PARAM_ALIGNMENT`, so that shards are equal and aligned; else parameters follow without gaps, as in
    Megatron-LM, up to the next one of `aligned`.

    Args:
        sizes: elements of each parameter.
        dp_size: ranks that a bucket may be cut over; None where none is.
        bucket_size: elements; None, without `num_buckets`, means one bucket.
        alone: indices of parameters that have a bucket of their own.
        aligned: indices of parameters whose gradient a layer computes in the buffer: a matrix product is slower, and
            rounds differently, in memory that is not aligned.
    """
    multiple = dp_size * PARAM_ALIGNMENT if dp_size else 1
    if for_high_busbw:
        multiple = math.lcm(multiple, HIGH_BUSBW_ALIGNMENT)
    total, seen = sum(sizes), 0
    layouts: list[BucketLayout] = []
    start, members, ranges = 0, list[int](), list[tuple[int, int]]()
    for index, size in enumerate(sizes):
        begin = ranges[-1][1] if ranges else 0
        if dp_size or index in aligned:
            begin = round_up(start + begin, PARAM_ALIGNMENT) - start
        members.append(index)
        ranges.append((begin, begin + size))
        seen += size
        is_full = bucket_size is not None and sum(sizes[i] for i in members) >= bucket_size
        if num_buckets is not None:
            is_full = seen * num_buckets >= total * (len(layouts) + 1)
        if is_full or index in alone or index + 1 in alone or index == len(sizes) - 1:
            end = start + round_up(begin + size, multiple)
            layouts.append(BucketLayout(start, end, tuple(members), tuple(ranges)))
            start, members, ranges = end, [], []
    return layouts


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class FullParamLayout:
    """The places of a model's parameters in buffers, which need not exist yet."""

    buckets: tuple[tuple[BucketLayout, ...], ...]
    """Of each buffer, in the order in which a wrapper makes them."""
