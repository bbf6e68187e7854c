"""`wrap_model` chooses a wrapper by the config's type, then by its strategy."""

from __future__ import annotations

import torch.distributed as dist

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import toy


def _chooses() -> list[str]:
    return [
        type(wrap_model(toy(), object(), ddp_config, process_group=dist.group.WORLD)).__name__
        for ddp_config in (
            DistributedDataParallelConfig(),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
            DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
            FullyShardedDataParallelConfig(),
            TorchFullyShardedDataParallelConfig(),
        )
    ]


def test_wrap_model_chooses_by_config_type_and_strategy():
    replicas, sharded = ["DistributedDataParallel"] * 3, ["FullyShardedDataParallel"] * 2
    assert run_distributed(_chooses, 1) == [[*replicas, *sharded, "TorchFullyShardedDataParallel"]]


def test_full_sharding_wraps_under_the_fake_backend():
    with fake_world(0, 4):
        wrapped = wrap_model(toy(), object(), FullyShardedDataParallelConfig(), process_group=dist.group.WORLD)
        kept = sum(unit.kept_bytes for unit in wrapped.plan.units)
        gathered = sum(unit.gathered_bytes for unit in wrapped.plan.units)
    assert (wrapped.plan.num_shards, 4 * kept) == (4, gathered)
