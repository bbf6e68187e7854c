"""The settings of wrappers check themselves, and choose a wrapper."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from core.base.errors import GradSyncError, ParallelConfigError, warn_once
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import toy


@pytest.mark.parametrize("config_class", [DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data_parallel_sharding_strategy": "zero3"}, "it takes one of no_shard, optim, optim_grads, "),
        ({"num_distributed_optimizer_instances": 0}, "num_distributed_optimizer_instances is 0"),
        ({"bucket_size": 0}, "bucket_size is 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(config_class, fields, said):
    with pytest.raises(ParallelConfigError, match=said):
        config_class(**fields)


def test_use_distributed_optimizer_alone_means_optim():
    assert DistributedDataParallelConfig().sharding_strategy == "no_shard"
    assert DistributedDataParallelConfig(use_distributed_optimizer=True).sharding_strategy == "optim"
    both = DistributedDataParallelConfig(
        use_distributed_optimizer=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    assert both.sharding_strategy == "optim_grads_params"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"num_distributed_optimizer_instances": 2},
            "num_distributed_optimizer_instances is 2.*use_distributed_optim",
        ),
        (
            {"reduce_every_micro_batch": True, "use_distributed_optimizer": True},
            "reduce_every_micro_batch.*data_parallel_sharding_strategy='optim_grads'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_both_named(fields, named):
    with pytest.raises(ParallelConfigError, match=named):
        DistributedDataParallelConfig(**fields)


def test_gathers_of_replicated_parameters_warn_and_are_ignored():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="overlap_param_gather is ignored without use_distributed_optimizer") as seen:
        config = DistributedDataParallelConfig(overlap_param_gather=True)
    assert config.overlap_param_gather and seen[0].filename == __file__


def test_accumulation_in_fp32_of_some_gradients_or_of_all():
    with pytest.raises(GradSyncError, match=r"fp32_local_accumulation is \('all',\) and grad_reduce_in_fp32"):
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, param_name_patterns_for_fp32_local_accumulation=("all",)
        )


@on_ranks(1)
def test_wrap_model_chooses_by_config_type_and_strategy() -> None:
    for ddp_config, name in (
        (DistributedDataParallelConfig(), "DistributedDataParallel"),
        (DistributedDataParallelConfig(use_distributed_optimizer=True), "DistributedDataParallel"),
        (DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"), "DistributedDataParallel"),
        (
            DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
            "FullyShardedDataParallel",
        ),
        (FullyShardedDataParallelConfig(), "FullyShardedDataParallel"),
        (TorchFullyShardedDataParallelConfig(), "TorchFullyShardedDataParallel"),
    ):
        assert type(wrap_model(toy(), object(), ddp_config, process_group=dist.group.WORLD)).__name__ == name


def test_full_sharding_wraps_under_the_fake_backend():
    with fake_world(0, 4):
        wrapped = wrap_model(toy(), object(), FullyShardedDataParallelConfig(), process_group=dist.group.WORLD)
        kept = sum(unit.kept_bytes for unit in wrapped.plan.units)
        gathered = sum(unit.gathered_bytes for unit in wrapped.plan.units)
    assert (wrapped.plan.num_shards, 4 * kept) == (4, gathered)
