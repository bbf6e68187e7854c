"""What overlaps by default, and settings that exclude each other or that an engine does not have."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from core import parallel_state
from core.base.errors import ConfigError, ParallelConfigError, WrapError
from core.base.megatron_names import changed_fields
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
    wrap_model,
)
from core.distributed.groups import find_groups
from core.distributed.plan import Plan, make_plan
from core.distributed.plan import settings as plan_settings
from core.distributed.plan.settings import check_reshard
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build, settings, toy


def _plan(device: str, **fields: Any) -> Plan:
    with (
        fake_world(rank=0, world_size=2),
        mock.patch.object(make_plan, "default_bucket_size", lambda ranks: 50),
        mock.patch.object(plan_settings.streams, "is_asynchronous", lambda on: device == "cuda"),
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


# ---- what is refused, by name


def test_a_number_divides_the_ranks_that_share_a_parameter():
    assert [check_reshard(value, 12) for value in (True, False, 1, 2, 6, 12)] == [True, False, False, 2, 6, True]
    with pytest.raises(
        ParallelConfigError, match=r"is 5, .* the 12 ranks .* True, False, or one of 1, 2, 3, 4, 6, 12"
    ):
        check_reshard(5, 12)


@on_ranks(2)
def test_what_buffers_cannot_honour_is_refused_by_name() -> None:
    world = {"process_group": dist.group.WORLD}
    three = settings("ddp", data_parallel_sharding_strategy="optim_grads_params")
    with pytest.raises(ParallelConfigError, match="'optim_grads_params'; use wrap_model"):
        DistributedDataParallel(object(), three, toy(), **world)
    with pytest.raises(ParallelConfigError, match=r"config\.bf16 is set, but every parameter is fp32"):
        build("ddp", toy(), config=SimpleNamespace(bf16=True))
    parallel_state.initialize_model_parallel()
    module = toy()
    module.blocks[0].gain = nn.Parameter(distribute_tensor(torch.ones(2), parallel_state.get_data_parallel_mesh()))
    with pytest.raises(WrapError, match=r"parameter blocks\.0\.gain is a DTensor"):
        DistributedDataParallel(object(), settings("ddp"), module)


@on_ranks(1)
def test_fields_that_only_buffers_have_warn_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            build("fsdp2", toy(), overlap_grad_reduce=True, bucket_size=7)
    (said,) = [str(warning.message) for warning in caught if "gradient buffers" in str(warning.message)]
    assert said.startswith("overlap_grad_reduce, bucket_size: ")


@on_ranks(1)
def test_what_fsdp2_cannot_honour_is_refused_by_name() -> None:
    world = {"process_group": dist.group.WORLD}
    for strategy in ("optim", "optim_grads"):
        with pytest.raises(ParallelConfigError, match=f"'{strategy}'"):
            TorchFullyShardedDataParallel(
                object(), DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy), toy(), **world
            )
    with pytest.raises(ParallelConfigError, match=r"param_name_patterns_for_fp32_local_.* set grad_reduce"):
        build("fsdp2", toy(), param_name_patterns_for_fp32_local_accumulation=("all",))
    model = build("fsdp2", toy())
    with pytest.raises(WrapError, match=r"its module 'blocks\.0' \(Block\) is sharded already"):
        build("fsdp2", nn.ModuleDict({"blocks": model.module.blocks}))
    scalar = nn.Linear(2, 2)
    scalar.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(WrapError, match=r"parameter gain is a scalar.*shape \(1,\)"):
        build("fsdp2", scalar)
    with pytest.raises(ParallelConfigError, match="force_all_reduce"):
        model.finish_grad_sync(force_all_reduce=True)


@on_ranks(2)
def test_a_setting_that_adds_in_another_order_is_refused() -> None:
    for name, config, fields, said in REFUSED:
        with pytest.raises(ParallelConfigError, match=said) as caught:
            build(name, toy(), config=SimpleNamespace(**config), reproducible_across_ranks=True, **fields)
        assert "\n" not in str(caught.value)


@on_ranks(3)
def test_ranks_without_a_tree_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match=r"3 data-parallel ranks share no tree.*1, 2, 4, 8"):
        build("ddp", toy(), reproducible_across_ranks=True)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("fsdp2", {}, {"collectives": "torch"}, "set collectives='auto'"),
    ("ddp", {"gradient_accumulation_fusion": True}, {}, "set gradient_accumulation_fusion=False"),
    ("zero3", {"bf16": True}, {"reduce_every_micro_batch": True}, "or reduce in float32"),
    ("fsdp2", {"bf16": True}, {"reduce_every_micro_batch": True}, "or reduce in float32"),
    ("ddp", {}, {"param_name_patterns_for_fp32_local_accumulation": ("all",)}, "set grad_reduce_in_fp32 in its place"),
]
"""Wrapper, fields of the model's config and of the wrapper's, and the end of the message."""


@dataclass
class _MegatronConfig:
    """Fields and defaults of Megatron-LM's config of the same name, and one that this library has never heard of."""

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    bucket_size: int | None = None
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    fp8_param_gather: bool = False
    of_tomorrow: int = 0


@dataclass
class _MegatronFsdp2Config:
    reshard_after_forward: bool | int = True


@pytest.mark.parametrize(
    ("given", "wrapper", "changed"),
    [
        (_MegatronConfig(), DistributedDataParallel, {}),
        (
            _MegatronConfig(use_distributed_optimizer=True, bucket_size=40, grad_reduce_in_fp32=True),
            DistributedDataParallel,
            {"use_distributed_optimizer": True, "bucket_size": 40, "grad_reduce_in_fp32": True},
        ),
        (
            _MegatronConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"),
            FullyShardedDataParallel,
            {"data_parallel_sharding_strategy": "optim_grads_params"},
        ),
        (
            _MegatronConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads"),
            DistributedDataParallel,
            {"data_parallel_sharding_strategy": "optim_grads"},
        ),
        (
            _MegatronConfig(data_parallel_sharding_strategy="optim_grads_params"),  # as its arguments set in every run
            DistributedDataParallel,
            {},
        ),
        (_MegatronFsdp2Config(False), TorchFullyShardedDataParallel, {"reshard_after_forward": False}),
    ],
)
@on_ranks(1)
def test_a_config_of_megatrons_is_read_by_name(given: Any, wrapper: type, changed: dict[str, Any]) -> None:
    groups = SimpleNamespace(dp_cp=dist.group.WORLD, dp=None, hcp=[dist.group.WORLD], unheard_of=1)
    for model in (
        wrapper(SimpleNamespace(), given, toy(), pg_collection=groups),
        wrap_model(toy(), given, pg_collection=groups),
    ):
        assert type(model) is wrapper
        assert changed_fields(model.ddp_config) == changed
        assert model.process_group is dist.group.WORLD


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (_MegatronConfig(fp8_param_gather=True), "fp8_param_gather is True, and only False is supported"),
        (_MegatronConfig(of_tomorrow=2), "_MegatronConfig has of_tomorrow=2, a setting that is not known here"),
        (SimpleNamespace(overlap_grad_reduce=False), "ddp_config is a SimpleNamespace, which is no config of a wrap"),
        (_MegatronFsdp2Config, "ddp_config is a type, which is no config of a wrapper"),
        (None, "ddp_config is a NoneType, which is no config of a wrapper"),
    ],
)
def test_a_config_that_cannot_be_read_is_said_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan_settings.own_settings(given)
    assert "\n" not in str(caught.value)


def test_a_value_of_the_wrong_type_is_pythons_error() -> None:
    wrong: Any = "40"
    with pytest.raises(TypeError, match="'int' and 'str'"):
        plan_settings.own_settings(_MegatronConfig(bucket_size=wrong))


@on_ranks(1)
def test_a_collection_without_groups_is_said_in_one_line() -> None:
    with pytest.raises(ParallelConfigError, match="pg_collection is a SimpleNamespace without groups; give an object"):
        DistributedDataParallel(None, _MegatronConfig(), toy(), pg_collection=SimpleNamespace(dp_cp=None))
