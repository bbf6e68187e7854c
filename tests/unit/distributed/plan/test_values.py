"""What a plan knows of itself: its root, its parameters, once each, and the settings that asked for what it does."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch.distributed as dist

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
)
from core.distributed.groups import find_groups
from core.distributed.plan import PieceKind, Plan, UnitPlan, plan_model
from core.distributed.plan.settings import Settings
from core.transformer import TransformerConfig
from tests.unit._ranks import fake_world
from tests.unit.distributed._toys import UNITS, toy


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


ALL_SETTINGS = [
    *(DistributedDataParallelConfig(data_parallel_sharding_strategy=s) for s in ("no_shard", "optim", "optim_grads")),
    FullyShardedDataParallelConfig(),
    TorchFullyShardedDataParallelConfig(),
]


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_advice_names_settings_that_there_are(settings: DistributedDataParallelConfig):
    with fake_world(rank=0, world_size=2):
        plan = plan_model(toy(), None, settings, find_groups("test", 1, dist.group.WORLD), UNITS)
    names = {f.name for kind in (TorchFullyShardedDataParallelConfig, TransformerConfig) for f in fields(kind)}
    said = {f.name for kind in (Plan, UnitPlan, Settings) for f in fields(kind)} | set(dir(plan))
    for name, asked_by in plan.asked_by.items():
        assert name in said
        assert {part.partition("=")[0] for part in asked_by.split(", ")} <= names
