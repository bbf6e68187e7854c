"""What a plan knows of itself: its root, its parameters, once each, and the settings that asked for what it does."""

from __future__ import annotations

from dataclasses import fields

import torch.distributed as dist

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.distributed.groups import find_groups
from core.distributed.plan import PieceKind, plan_model
from tests.unit._ranks import fake_world
from tests.unit.distributed._toys import UNITS, toy

ALL_SETTINGS = [
    *(DistributedDataParallelConfig(data_parallel_sharding_strategy=s) for s in ("no_shard", "optim", "optim_grads")),
    FullyShardedDataParallelConfig(),
    TorchFullyShardedDataParallelConfig(),
]


def test_a_plan_ends_with_the_model_and_has_each_parameter_once():
    module = toy(tied=False)
    module.embedding.requires_grad_(False)
    with fake_world(rank=0, world_size=2):
        for settings in ALL_SETTINGS:
            plan = plan_model(module, None, settings, find_groups("test", 1, dist.group.WORLD), UNITS)
            assert plan.root is plan.units[-1] and plan.root.modules == (module,) and plan.root.names == ("",)
            names = [param.name for unit in plan.units for param in unit.params]
            assert sorted(names) == sorted(name for name, _ in module.named_parameters())
            assert plan.trained_params.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
            for index, buckets in enumerate(plan.buffers):
                assert [bucket.bucket for bucket in buckets] == [(index, number) for number in range(len(buckets))]
                assert (
                    len({PieceKind(**{f.name: getattr(b, f.name) for f in fields(PieceKind)}) for b in buckets}) == 1
                )
