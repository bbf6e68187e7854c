"""Collectives on flat buffers: sums, means and parts in rank order, and no byte more than a ring sends."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from core.comm import collectives
from core.comm.gloo import Sum
from tests.unit._spawn import on_ranks
from tests.unit.comm._sums import SHARD, WHAT, addend_of, sum_of
from tests.unit.distributed._toys import CountedTraffic


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks("world_size")
def test_reduction_mean_scale_and_accumulate(world_size):
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = sum_of(size, torch.float32, torch.float32).chunk(size)[rank]
    output = torch.ones(SHARD)
    for op, scale, factor in ((dist.ReduceOp.AVG, 1.0, 1 / size), (dist.ReduceOp.SUM, 0.5, 0.5)):
        whole = addend_of(rank, size, torch.float32)
        collectives.reduce_scatter(output, whole, dist.group.WORLD, Sum(op=op, scale=scale), what=WHAT)
        assert torch.equal(output, expected * factor)
    saved = output.clone()
    whole = addend_of(rank, size, torch.float32)
    collectives.reduce_scatter(output, whole, dist.group.WORLD, Sum(scale=0.25, accumulate=True), what=WHAT)
    assert torch.equal(output, saved + expected * 0.25)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks("world_size")
def test_all_gather_puts_parts_in_rank_order(world_size):
    size, rank = dist.get_world_size(), dist.get_rank()
    for in_place in (True, False):
        output = torch.zeros(size * SHARD)
        own = output.chunk(size)[rank] if in_place else torch.empty(SHARD)
        own.fill_(rank + 1.0)
        collectives.all_gather(output, own, dist.group.WORLD, what=WHAT)
        assert torch.equal(output, torch.arange(1.0, size + 1).repeat_interleave(SHARD))


@on_ranks(4)
def test_all_reduce_is_bitwise_on_all_ranks():
    for dtype, length in product((torch.float32, torch.bfloat16), (4 * SHARD, 4 * SHARD - 3, 3)):
        addend, expected = addend_of(dist.get_rank(), 4, dtype)[:length], 0.25 * sum_of(4, dtype, dtype)[:length]
        for of_four in (Sum(scale=0.25), Sum(op=dist.ReduceOp.AVG)):
            actual = addend.clone()
            collectives.all_reduce(actual, dist.group.WORLD, of_four, what=WHAT)
            assert torch.equal(actual, expected), (dtype, length, of_four)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_bytes_sent_equal_ideal_ring(world_size):
    one_way = (world_size - 1) * SHARD * 4  # (n - 1) / n of the buffer
    size = dist.get_world_size()
    whole = addend_of(dist.get_rank(), size, torch.float32)
    own = whole.chunk(size)[dist.get_rank()]
    counts = []
    for run in (
        lambda: collectives.reduce_scatter(own, whole, dist.group.WORLD, what=WHAT),
        lambda: collectives.all_gather(whole, own, dist.group.WORLD, what=WHAT),
        lambda: collectives.all_reduce(whole, dist.group.WORLD, what=WHAT),
    ):
        with CountedTraffic() as traffic:
            run()
        counts.append(traffic.sent_bytes)
    assert counts == [one_way, one_way, 2 * one_way]
