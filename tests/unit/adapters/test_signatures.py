"""The names, signatures and defaults that code written for sibling systems relies on."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

from core.adapters import ml, nemo, optimus, oumi

FUNCTIONS: dict[Any, str] = {
    nemo.fsdp2_strategy_parallelize: "model, device_mesh, mp_policy=None, tp_shard_plan=None, offload_policy=None",
    nemo.nvfsdp_strategy_parallelize: "model, device_mesh, nvfsdp_unit_modules=None, tp_shard_plan=None, "
    "data_parallel_sharding_strategy='optim_grads_params', init_nvfsdp_with_meta_device=False, "
    "grad_reduce_in_fp32=False, preserve_fp32_weights=False, overlap_grad_reduce=True, overlap_param_gather=True, "
    "check_for_nan_in_grad=True, average_in_collective=False, disable_bucketing=False, "
    "calculate_per_token_loss=False, keep_fp8_transpose_cache_when_using_custom_fsdp=False, nccl_ub=False, "
    "fsdp_double_buffer=False",
    nemo.import_classes_from_paths: "class_paths",
    nemo.get_hf_tp_shard_plan: "model",
    inspect.unwrap(nemo.translate_to_torch_parallel_style): "style",
    oumi.prepare_model: "model, params",
    ml.ddp: "model, cfg",
    ml.fsdp: "model, cfg",
    ml.dp: "model, cfg",
    ml.TaskModel: "task, model",
    ml.TaskModel.forward: "self, batch, state",
    optimus.DDPTransform: "cfg, collective, device",
    optimus.FullyShardTransform: "cfg, collective, device",
    optimus.BaseDistributedTransform: "cfg, collective, device",
    optimus.DDPWrappedModel.accumulation_context: "self, is_last_microbatch",
    optimus.DDPWrappedModel.make_parameter_groups: "self",
}

CONFIGS: dict[Any, str] = {
    oumi.FSDPParams: "enable_fsdp=False, sharding_strategy=FULL_SHARD, cpu_offload=False, mixed_precision=None, "
    "backward_prefetch=BACKWARD_PRE, forward_prefetch=False, use_orig_params=None, state_dict_type=FULL_STATE_DICT, "
    "auto_wrap_policy=NO_WRAP, min_num_params=100000, transformer_layer_cls=None, sync_module_states=True",
    optimus.DDPTransformConfig: "find_unused_parameters=False, gradient_as_bucket_view=True, static_graph=False",
    optimus.FullyShardTransformConfig: "reshard_after_forward=False, mixed_precision=None, offload=None, "
    "use_hybrid_sharding=True, sync_grad_accum=False",
    optimus.MixedPrecisionConfig: "param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=True",
    optimus.OffloadConfig: "cpu_offload=False, pin_memory=True",
    ml.ParallelConfig: "use_fsdp=False, cpu_offload=False, sharding_strategy=HYBRID_SHARD, sync_module_states=True",
    ml.TrainerParallelConfig: "name='???', exp_name=None, exp_dir=None, log_dir_name='logs', "
    f"use_double_weight_precision=False, checkpoint=None, parallel={ml.ParallelConfig()!r}",
}

ENUMS = {
    oumi.ShardingStrategy: "FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD NO_SHARD HYBRID_SHARD_ZERO2",
    oumi.StateDictType: "FULL_STATE_DICT SHARDED_STATE_DICT LOCAL_STATE_DICT",
    oumi.BackwardPrefetch: "BACKWARD_PRE BACKWARD_POST NO_PREFETCH",
    oumi.AutoWrapPolicy: "SIZE_BASED_WRAP TRANSFORMER_BASED_WRAP NO_WRAP",
}


def _source(arguments: Iterable[tuple[str, Any]]) -> str:
    """Returns arguments with their defaults, as written in a call; an enum's member by its name alone."""
    parts = []
    for name, default in arguments:
        value = default.name if isinstance(default, enum.Enum) else repr(default)
        parts.append(name if default is inspect.Parameter.empty else f"{name}={value}")
    return ", ".join(parts)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_functions_have_the_original_signatures(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert _source(positional) == FUNCTIONS[function]
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_fields_and_defaults(config):
    made = config()
    assert _source((field.name, getattr(made, field.name)) for field in dataclasses.fields(made)) == CONFIGS[config]
    if config is ml.ParallelConfig:
        assert made.sharding_strategy is torch_fsdp.ShardingStrategy.HYBRID_SHARD


def test_further_options_of_fsdp2_are_keywords():
    options = inspect.signature(nemo.fsdp2_strategy_parallelize).parameters
    assert options["activation_checkpointing"].kind is inspect.Parameter.KEYWORD_ONLY
    assert options["activation_checkpointing"].default is False
    assert isinstance(nemo.HAVE_NVFSDP, bool)


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_members_of_oumis_enums_in_order_and_as_torchs(kind):
    assert [member.name for member in kind] == [member.value for member in kind] == ENUMS[kind].split()
    assert all(isinstance(member, str) for member in kind)
    of_torch = getattr(torch_fsdp, kind.__name__, None)
    for member in kind if of_torch else ():
        found = member.to_torch()
        if member.name == "NO_PREFETCH":
            assert found is None
        else:
            assert isinstance(found, of_torch) and found.name.removeprefix("_") == member.name
