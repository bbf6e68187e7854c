"""The names, signatures and defaults that code written for sibling systems relies on."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

from core.adapters import ml, nemo, optimus, oumi

NO_DEFAULT = inspect.Parameter.empty

FUNCTIONS: dict[Any, dict[str, Any]] = {
    nemo.fsdp2_strategy_parallelize: {
        "model": NO_DEFAULT,
        "device_mesh": NO_DEFAULT,
        "mp_policy": None,
        "tp_shard_plan": None,
        "offload_policy": None,
    },
    nemo.nvfsdp_strategy_parallelize: {
        "model": NO_DEFAULT,
        "device_mesh": NO_DEFAULT,
        "nvfsdp_unit_modules": None,
        "tp_shard_plan": None,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "init_nvfsdp_with_meta_device": False,
        "grad_reduce_in_fp32": False,
        "preserve_fp32_weights": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "check_for_nan_in_grad": True,
        "average_in_collective": False,
        "disable_bucketing": False,
        "calculate_per_token_loss": False,
        "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
    },
    nemo.import_classes_from_paths: {"class_paths": NO_DEFAULT},
    nemo.get_hf_tp_shard_plan: {"model": NO_DEFAULT},
    inspect.unwrap(nemo.translate_to_torch_parallel_style): {"style": NO_DEFAULT},
    oumi.prepare_model: {"model": NO_DEFAULT, "params": NO_DEFAULT},
    ml.ddp: {"model": NO_DEFAULT, "cfg": NO_DEFAULT},
    ml.fsdp: {"model": NO_DEFAULT, "cfg": NO_DEFAULT},
    ml.dp: {"model": NO_DEFAULT, "cfg": NO_DEFAULT},
    ml.TaskModel: {"task": NO_DEFAULT, "model": NO_DEFAULT},
    ml.TaskModel.forward: {"self": NO_DEFAULT, "batch": NO_DEFAULT, "state": NO_DEFAULT},
    optimus.DDPTransform: {"cfg": NO_DEFAULT, "collective": NO_DEFAULT, "device": NO_DEFAULT},
    optimus.FullyShardTransform: {"cfg": NO_DEFAULT, "collective": NO_DEFAULT, "device": NO_DEFAULT},
    optimus.BaseDistributedTransform: {"cfg": NO_DEFAULT, "collective": NO_DEFAULT, "device": NO_DEFAULT},
    optimus.DDPWrappedModel.accumulation_context: {"self": NO_DEFAULT, "is_last_microbatch": NO_DEFAULT},
    optimus.DDPWrappedModel.make_parameter_groups: {"self": NO_DEFAULT},
}

CONFIGS: dict[Any, dict[str, Any]] = {
    oumi.FSDPParams: {
        "enable_fsdp": False,
        "sharding_strategy": oumi.ShardingStrategy.FULL_SHARD,
        "cpu_offload": False,
        "mixed_precision": None,
        "backward_prefetch": oumi.BackwardPrefetch.BACKWARD_PRE,
        "forward_prefetch": False,
        "use_orig_params": None,
        "state_dict_type": oumi.StateDictType.FULL_STATE_DICT,
        "auto_wrap_policy": oumi.AutoWrapPolicy.NO_WRAP,
        "min_num_params": 100_000,
        "transformer_layer_cls": None,
        "sync_module_states": True,
    },
    optimus.DDPTransformConfig: {
        "find_unused_parameters": False,
        "gradient_as_bucket_view": True,
        "static_graph": False,
    },
    optimus.FullyShardTransformConfig: {
        "reshard_after_forward": False,
        "mixed_precision": None,
        "offload": None,
        "use_hybrid_sharding": True,
        "sync_grad_accum": False,
    },
    optimus.MixedPrecisionConfig: {
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
    },
    optimus.OffloadConfig: {"cpu_offload": False, "pin_memory": True},
    ml.ParallelConfig: {
        "use_fsdp": False,
        "cpu_offload": False,
        "sharding_strategy": torch_fsdp.ShardingStrategy.HYBRID_SHARD,
        "sync_module_states": True,
    },
    ml.TrainerParallelConfig: {
        "name": "???",
        "exp_name": None,
        "exp_dir": None,
        "log_dir_name": "logs",
        "use_double_weight_precision": False,
        "checkpoint": None,
        "parallel": ml.ParallelConfig(),
    },
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_functions_have_the_original_signatures(function):
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(found.items()) == list(FUNCTIONS[function].items())
    assert all(p.default is not NO_DEFAULT for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_fields_and_defaults(config):
    made = config()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(made)} == CONFIGS[config]
    assert [f.name for f in dataclasses.fields(made)] == list(CONFIGS[config])


def test_further_options_of_fsdp2_are_keywords():
    options = inspect.signature(nemo.fsdp2_strategy_parallelize).parameters
    assert options["activation_checkpointing"].kind is inspect.Parameter.KEYWORD_ONLY
    assert options["activation_checkpointing"].default is False
    assert isinstance(nemo.HAVE_NVFSDP, bool)


def test_members_of_oumis_enums_in_order_and_as_torchs():
    expected = {
        oumi.ShardingStrategy: ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "HYBRID_SHARD_ZERO2"],
        oumi.StateDictType: ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"],
        oumi.BackwardPrefetch: ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
        oumi.AutoWrapPolicy: ["SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP"],
    }
    for enum, names in expected.items():
        assert [member.name for member in enum] == [member.value for member in enum] == names
        assert all(isinstance(member, str) for member in enum)
    torchs = {
        oumi.ShardingStrategy: torch_fsdp.ShardingStrategy,
        oumi.StateDictType: torch_fsdp.StateDictType,
        oumi.BackwardPrefetch: torch_fsdp.BackwardPrefetch,
    }
    for enum, of_torch in torchs.items():
        for member in enum:
            if member.name == "NO_PREFETCH":
                assert member.to_torch() is None
            else:
                found = member.to_torch()
                assert isinstance(found, of_torch) and found.name.removeprefix("_") == member.name
