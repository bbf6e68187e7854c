"""The gradient that an optimizer reads, and flat gradients that are reduced over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import ShardstackError
from core.comm.lane import comm_lane
from core.distributed.engine.gradients import (
    BucketReduction,
    UnreadableGradient,
    is_unreadable,
    local_gradient,
    read_gradient,
)
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, toy


def test_main_grad_is_read_where_there_is_one():
    param = nn.Parameter(torch.zeros(2))
    assert read_gradient(param) is None
    param.grad = torch.ones(2)
    assert read_gradient(param) is param.grad
    param.main_grad = torch.full((2,), 2.0)
    assert read_gradient(param) is param.main_grad and local_gradient(param) is param.main_grad


def test_an_unreadable_gradient_raises_and_keeps_what_is_added():
    param = nn.Parameter(torch.zeros(2))
    param.grad = UnreadableGradient(param)
    assert is_unreadable(param.grad) and not is_unreadable(param)
    for read in (torch.clone, torch.Tensor.sum, lambda grad: grad + 1.0):
        with pytest.raises(ShardstackError, match="keeps a shard of it on each rank"):
            read(param.grad)
    (3.0 * param).sum().backward()
    assert is_unreadable(param.grad) and vars(param.grad)["added"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["ddp", "zero2"])
@on_ranks(2)
def test_a_rank_has_the_mean_and_adds_to_its_shard(kind: str, dtype: torch.dtype) -> None:
    plan = build(kind, toy()).plan
    reduction = BucketReduction(plan, comm_lane(torch.device("cpu")), lambda gradients: None, None)
    rank = dist.get_rank()
    whole = torch.arange(8, dtype=dtype) + 2.0 * rank
    mean = torch.arange(8, dtype=torch.float32) + 1.0
    if kind == "ddp":
        reduction.reduce(whole, whole, False)
        assert torch.equal(whole.float(), mean)
        return
    shard = torch.full((4,), 5.0)  # of another dtype than half gradients: additions are not rounded to it
    reduction.reduce(whole.clone(), shard, False)
    assert torch.equal(shard, mean.chunk(2)[rank])
    reduction.reduce(whole.clone(), shard, True)
    assert torch.equal(shard, 2.0 * mean.chunk(2)[rank])
