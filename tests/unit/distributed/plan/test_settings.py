"""What overlaps by default, and that what overlaps is in several pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from core.distributed import DistributedDataParallelConfig
from core.distributed.groups import find_groups
from core.distributed.plan import Plan, make_plan, settings
from tests.unit._ranks import fake_world
from tests.unit.distributed._toys import toy


def _plan(device: str, **fields: Any) -> Plan:
    with (
        fake_world(rank=0, world_size=2),
        mock.patch.object(make_plan, "default_bucket_size", lambda ranks: 50),
        mock.patch.object(settings.streams, "is_asynchronous", lambda on: device == "cuda"),
    ):
        groups = find_groups("test", 1, dist.group.WORLD, None)
        return make_plan.plan_model(toy(), SimpleNamespace(), DistributedDataParallelConfig(**fields), groups)


@pytest.mark.parametrize("sharded", [False, True])
def test_on_a_gpu_all_overlaps_unless_it_is_switched_off(sharded: bool) -> None:
    fields = {"use_distributed_optimizer": sharded}
    for device, overlaps in (("cuda", True), ("cpu", False)):
        plan = _plan(device, **fields)
        assert (plan.settings.overlap_grad_reduce, plan.settings.overlap_param_gather) == (
            overlaps,
            overlaps and sharded,
        )
        assert (len(plan.reduction_order) > 1) == overlaps
    off = _plan("cuda", **fields, overlap_grad_reduce=False, overlap_param_gather=False)
    assert (
        not off.settings.overlap_grad_reduce
        and not off.settings.overlap_param_gather
        and len(off.reduction_order) == 1
    )


def test_parameters_gathered_in_forward_are_in_several_buckets() -> None:
    plan = _plan("cpu", use_distributed_optimizer=True, overlap_param_gather=True)
    assert not plan.settings.overlap_grad_reduce and len(plan.reduction_order) > 1
