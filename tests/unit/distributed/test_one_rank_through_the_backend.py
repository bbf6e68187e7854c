"""What several ranks send goes through the lane and the backend where one rank is alone too, and changes no bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from core.comm import collectives
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._on_gpu import ON_GPU, one_rank_on_a_gpu
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, loss_of, toy


def _trained(
    device: str, kind: str, fields: dict[str, Any], skips: bool
) -> tuple[list[torch.Tensor], list[float], int]:
    """Returns weights and norms of three steps, and how many reductions reached the backend."""
    with (
        mock.patch.object(collectives, "SKIPS_GROUPS_OF_ONE", skips),
        mock.patch.object(collectives.dist, "all_reduce", wraps=collectives.dist.all_reduce) as reduced,
        mock.patch.object(collectives, "reduce_scatter_single", wraps=collectives.reduce_scatter_single) as scattered,
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
        model.settle_parameters()
        calls = reduced.call_count - before + scattered.call_count
    return [p.detach().cpu().clone() for p in model.module.parameters()], norms, calls


def _compare(device: str, kind: str, fields: dict[str, Any]) -> None:
    weights, norms, none = _trained(device, kind, fields, True)
    through, norms_through, some = _trained(device, kind, fields, False)
    assert none == 0 and some >= 3 * 2, (none, some)
    assert norms == norms_through and all(map(torch.equal, weights, through))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ddp", {"overlap_grad_reduce": True, "num_buckets": 4}),
        ("ddp", {"overlap_grad_reduce": True, "num_buckets": 4, "average_in_collective": True}),
        ("zero1_overlap", {}),
        ("zero2_overlap", {}),
    ],
)
def test_one_rank_through_the_lane(device: str, kind: str, fields: dict[str, Any]) -> None:
    if device == "cpu":
        if "average_in_collective" in fields:
            pytest.skip("gloo has no average")
        run_distributed(_compare, 1, device, kind, fields)
        return
    with one_rank_on_a_gpu():
        _compare(device, kind, fields)
