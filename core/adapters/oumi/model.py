"""Wraps a model by `FSDPParams`, and saves and loads its state dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ... import device
from ...dist_checkpointing import load_model_state_dict as load_whole_or_sharded
from ...dist_checkpointing import model_state_dict as global_state_dict
from ...dist_checkpointing.global_view import local_tensor
from ...distributed import (
    TorchFullyShardedDataParallelConfig,
    _BaseDataParallel,
)
from ...distributed.data_parallel_base import unwrap_model
from ...distributed.groups import whole_group
from ...distributed.plan.units import UnitChoice
from ...dtypes import as_dtype
from ...errors import CheckpointError, warn_once
from ..bridge.meshes import data_parallel_mesh, fully_replicated
from ..bridge.units import units_by_class, units_by_size
from ..bridge.wrapping import Replicas, wrap_for_trainer
from .params import AutoWrapPolicy, BackwardPrefetch, FSDPParams, ShardingStrategy, StateDictType

_ABOUT_SHARDS = ("backward_prefetch", "forward_prefetch", "auto_wrap_policy", "state_dict_type", "sync_module_states")


def prepare_model(model: nn.Module, params: FSDPParams, *, device_mesh: DeviceMesh | None = None) -> _BaseDataParallel:
    """Wraps a model as an oumi config's ``fsdp`` block says.

    Gradients are in ``param.grad`` after backward, under every strategy, and `get_megatron_optimizer` takes the
    result too. The wrapped model is ``.module``, whose ``generate`` works.

    Args:
        model: any module, on this rank's device.
        params: checked here.
        device_mesh: the ranks, by the names of its axes; by default all, sharded within machines (by
            ``LOCAL_WORLD_SIZE``) under the hybrid strategies.

    Raises:
        ConfigError: a field that cannot be honoured.
        WrapError: a class that the model has none of.
    """
    params = dataclasses.replace(params)
    params.finalize_and_validate()
    if not params.enable_fsdp:
        _say_what_is_ignored(params)
        return Replicas(model, whole_group(data_parallel_mesh(device_mesh, hybrid=False)))
    _say_what_fsdp2_does_instead(params)
    strategy = params.sharding_strategy
    mesh = data_parallel_mesh(device_mesh, hybrid=strategy.is_hybrid)
    dtype = as_dtype(params.mixed_precision)
    if strategy is ShardingStrategy.NO_SHARD:
        if not (params.cpu_offload or (dtype is not None and _casts(model, dtype))):
            _warn_of_units_without_shards(params)
            return Replicas(model, whole_group(mesh))
        mesh = fully_replicated(mesh)
    settings = TorchFullyShardedDataParallelConfig(
        reshard_after_forward=strategy.frees_after_forward,
        forward_prefetch=int(params.forward_prefetch),
        backward_prefetch=int(params.backward_prefetch is not BackwardPrefetch.NO_PREFETCH),
        param_dtype=dtype,
        reduce_dtype=dtype,
        cpu_offload=params.cpu_offload,
        pin_memory=device.device_type() != "cpu",
        sync_module_states=params.sync_module_states,
    )
    return wrap_for_trainer(model, settings, mesh, _units(model, params), fp16=dtype == torch.float16)


def model_state_dict(model: nn.Module, params: FSDPParams) -> dict[str, torch.Tensor]:
    """Returns the model's state, as ``state_dict_type`` says; every rank has to call it.

    FULL_STATE_DICT: whole tensors on the CPU, on every rank. SHARDED_STATE_DICT: DTensors of the whole model's
    tensors, which share the model's storage. LOCAL_STATE_DICT: this rank's pieces, sharing it too.
    """
    kind = _state_dict_type(params)
    view = global_state_dict(unwrap_model(model))
    if kind is StateDictType.SHARDED_STATE_DICT:
        return view
    if kind is StateDictType.LOCAL_STATE_DICT:
        return {name: local_tensor(tensor) for name, tensor in view.items()}
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()
        for name, tensor in view.items()
    }


def load_model_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor], params: FSDPParams) -> None:
    """Copies what `model_state_dict` gave, under the same ``state_dict_type``, into the model.

    Raises:
        CheckpointError: names or shapes that differ; nothing has been written then.
    """
    module = unwrap_model(model)
    if _state_dict_type(params) is not StateDictType.LOCAL_STATE_DICT:
        load_whole_or_sharded(module, state_dict)
        return
    own = {name: local_tensor(tensor) for name, tensor in global_state_dict(module).items()}
    wrong = [name for name in own.keys() | state_dict.keys() if _shape(own, name) != _shape(state_dict, name)]
    if wrong:
        raise CheckpointError(
            f"LOCAL_STATE_DICT holds pieces of one rank's own cut, and these differ from the model's: "
            f"{', '.join(sorted(wrong))}; load it where and as it was saved, or save FULL_STATE_DICT"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state_dict[name])


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _state_dict_type(params: FSDPParams) -> StateDictType:
    params = dataclasses.replace(params)
    params.finalize_and_validate()
    return params.state_dict_type


def _units(model: nn.Module, params: FSDPParams) -> list[UnitChoice]:
    if params.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        return list(units_by_size(model, params.min_num_params))
    if params.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return list(units_by_class(model, params.transformer_layer_cls, "transformer_layer_cls"))
    return []


def _casts(model: nn.Module, dtype: torch.dtype) -> bool:
    return any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in model.parameters())


def _changed(params: FSDPParams) -> list[str]:
    """Returns the names of fields that are not at their defaults."""
    return [field.name for field in dataclasses.fields(params) if getattr(params, field.name) != field.default]


def _say_what_is_ignored(params: FSDPParams) -> None:
    ignored = _changed(params)
    if ignored:
        warn_once(f"enable_fsdp is False, so that {', '.join(ignored)} have no effect: the model is replicated")


def _say_what_fsdp2_does_instead(params: FSDPParams) -> None:
    if params.use_orig_params is not None:
        warn_once(
            f"use_orig_params={params.use_orig_params} has no meaning on FSDP2, which shards each original parameter "
            "by itself in any case"
        )
    if params.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        warn_once(
            "backward_prefetch=BACKWARD_POST has no counterpart on FSDP2, which gathers the next unit before a unit's "
            "gradients, as BACKWARD_PRE says. No number changes"
        )
    policy = params.auto_wrap_policy
    for name, its_policy in (
        ("min_num_params", AutoWrapPolicy.SIZE_BASED_WRAP),
        ("transformer_layer_cls", AutoWrapPolicy.TRANSFORMER_BASED_WRAP),
    ):
        if name in _changed(params) and policy is not its_policy:
            warn_once(f"{name} is about {its_policy.value} and has no effect under auto_wrap_policy {policy.value}")


def _warn_of_units_without_shards(params: FSDPParams) -> None:
    ignored = [name for name in _changed(params) if name in _ABOUT_SHARDS]
    if ignored:
        warn_once(
            f"sharding_strategy is NO_SHARD, so that {', '.join(ignored)} have no effect: replicas hold the whole "
            "model, and begin with the first rank's values"
        )
