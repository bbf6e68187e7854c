"""What several ranks send goes through the lane and the backend where one rank is alone too, and changes no bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.parameters import local_part
from core.comm import collectives
from core.comm.record import record_of
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._on_gpu import ON_GPU, run_on_one_rank
from tests.unit.distributed._toys import Block, batches, build, communication_of, loss_of, toy


def _trained(
    device: str, kind: str, fields: dict[str, Any], skips: bool
) -> tuple[list[torch.Tensor], list[float], tuple[int, int]]:
    """Returns weights and norms of three steps, and how many reductions and gathers reached the backend."""
    with (
        collectives.SKIPS_GROUPS_OF_ONE.replaced(skips),
        mock.patch.object(collectives.dist, "all_reduce", wraps=collectives.dist.all_reduce) as reduced,
        mock.patch.object(collectives, "reduce_scatter_single", wraps=collectives.reduce_scatter_single) as scattered,
        mock.patch.object(collectives, "all_gather_single", wraps=collectives.all_gather_single) as gathered,
    ):
        model = build(kind, toy(tied=False).to(device), **fields)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.1), [model])
        before = reduced.call_count
        norms = []
        for _ in range(3):
            model.zero_grad_buffer()
            loss_of(model, batches(0)[0].to(device)).backward()
            model.finish_grad_sync()
            norms.append(optimizer.step()[1])
        model.engine.parameters.settle()
        calls = reduced.call_count - before + scattered.call_count, gathered.call_count
    weights = [local_part(p).cpu().clone() for group in optimizer.param_groups for p in group["params"]]
    return weights, norms, calls


def _compare(device: str, kind: str, fields: dict[str, Any]) -> None:
    weights, norms, none = _trained(device, kind, fields, True)
    through, norms_through, (reductions, gathers) = _trained(device, kind, fields, False)
    assert none[0] == 0 and reductions >= 3 * 2, (none, reductions)
    if kind == "zero3":
        assert none[1] == 0 and gathers >= 3 * 2, (none, gathers)
    assert norms == norms_through and all(map(torch.equal, weights, through))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ddp", {"overlap_grad_reduce": True, "bucket_size": 60}),
        ("zero1_overlap", {}),
        ("zero2_overlap", {}),
        ("zero3", {"param_dtype": torch.bfloat16}),  # in one dtype a rank that is alone gathers nothing
        ("zero3", {"param_dtype": torch.bfloat16, "forward_prefetch": 2, "reduce_every_micro_batch": True}),
    ],
)
def test_one_rank_through_the_lane(device: str, kind: str, fields: dict[str, Any]) -> None:
    run_on_one_rank(device, _compare, kind, fields)


def _fsdp2_equals_ddp(device: str) -> None:
    found, norms, _ = _trained(device, "fsdp2", {}, False)
    expected, expected_norms, _ = _trained(device, "ddp", {}, True)
    assert norms == expected_norms and all(map(torch.equal, found, expected))


def _each_collective_of_fsdp2(device: str) -> None:
    """Calls what FSDP2 calls on several ranks, which it skips on one."""
    group = dist.group.WORLD
    model = build("fsdp2", toy(tied=False).to(device))
    block = next(module for module in model.module.modules() if isinstance(module, Block))
    gather, reduce = communication_of(block)
    values = torch.arange(8.0, device=device)
    for asynchronous in (False, True):
        work = []
        for call, op in ((gather, {}), (reduce, {"op": dist.ReduceOp.SUM})):
            output = call.allocate((8,), dtype=values.dtype, device=values.device).fill_(-1.0)
            work.append((output, call(output, values, group, async_op=asynchronous, **op)))
        for output, one in work:
            if one is not None:
                one.wait()
            assert torch.equal(output, values)
    calls = [call for call in record_of(group).calls if "blocks.0" in call.what]
    assert [call.kind for call in calls] == ["all-gather", "reduce-scatter"] * 2
    assert all(call.is_over and (call.event is not None) == (device == "cuda") for call in calls)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("function", [_fsdp2_equals_ddp, _each_collective_of_fsdp2])
def test_fsdp2_on_one_rank(device: str, function: Any) -> None:
    run_on_one_rank(device, function)
