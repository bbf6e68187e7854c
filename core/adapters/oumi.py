"""Oumi's `FSDPParams` become this library's wrappers: `prepare_model` translates them, by tables.

A ``fsdp:`` block with its fields, defaults and values is read, checked, and made into replicas or FSDP2's settings;
state dicts go out and in by its ``state_dict_type``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..base.dtypes import as_dtype
from ..base.errors import ConfigError
from ..base.module_protocol import unwrap_model
from ..base.text import choices
from ..dist_checkpointing import model_state_dict as global_state_dict
from ..distributed import _BaseDataParallel
from ..distributed.fully_sharded_data_parallel_config import FSDP2, config_of
from ..distributed.plan.units import UnitChoice
from .bridge.checkpoints import whole_state_dict
from .bridge.sharding import data_parallel_mesh, fully_replicated, units_by_class, units_by_size
from .bridge.translation import Replicas, check_settings, wrap_for_trainer


class _OfTorch(StrEnum):
    """Members of an enum of `torch.distributed.fsdp` that has the same name."""

    def to_torch(self) -> Any:
        """Returns torch's member of this name, which may begin with an underscore there. None if torch has none."""
        members = getattr(torch_fsdp, type(self).__name__).__members__
        return members.get(self.name, members.get(f"_{self.name}"))


class ShardingStrategy(_OfTorch):
    """Oumi's sharding strategies."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"

    @property
    def is_hybrid(self) -> bool:
        """Sharded within, replicated across machines."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class StateDictType(_OfTorch):
    """Oumi's forms of a state dict, which `model_state_dict` returns."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"


class BackwardPrefetch(_OfTorch):
    """When backward gathers the parameters that it needs next."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NO_PREFETCH = "NO_PREFETCH"


class AutoWrapPolicy(StrEnum):
    """Oumi's ways to choose units."""

    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"
    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"
    NO_WRAP = "NO_WRAP"


_ENUMS: dict[str, type[Enum]] = {
    "sharding_strategy": ShardingStrategy,
    "backward_prefetch": BackwardPrefetch,
    "state_dict_type": StateDictType,
    "auto_wrap_policy": AutoWrapPolicy,
}


@dataclass
class FSDPParams:
    """The ``fsdp:`` block of an oumi config, with oumi's fields, defaults and values.

    Enum values may be given by name; `finalize_and_validate` rejects unknown names.
    """

    enable_fsdp: bool = False
    """Shard by `sharding_strategy`. Otherwise the model is replicated, and the other fields are without effect."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """FULL_SHARD and HYBRID_SHARD free parameters after forward, SHARD_GRAD_OP and HYBRID_SHARD_ZERO2 do not."""

    cpu_offload: bool = False
    """Keep shards in the host's memory."""

    mixed_precision: str | None = None
    """Dtype of computation and reduction: ``bf16``, ``fp16`` or ``fp32``. None: the parameters' dtype."""

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    """BACKWARD_PRE gathers one unit ahead in backward, NO_PREFETCH none. BACKWARD_POST is run as the first."""

    forward_prefetch: bool = False
    """Gather one unit ahead in forward."""

    use_orig_params: bool | None = None
    """FSDP2 keeps the original parameters in any case."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    """Form of `model_state_dict`: whole tensors or DTensors."""

    auto_wrap_policy: AutoWrapPolicy = AutoWrapPolicy.NO_WRAP
    """Units by parameter count, by the class of the transformer's layers, or the model as one."""

    min_num_params: int = 100_000
    """Least number of parameters of a SIZE_BASED_WRAP unit, without the parameters of units inside the unit."""

    transformer_layer_cls: str | None = None
    """Class names for TRANSFORMER_BASED_WRAP, with commas between, plain or dotted. None: the model's layers."""

    sync_module_states: bool = True
    """Begin with the first rank's values."""

    def finalize_and_validate(self) -> None:
        """Checks every field, and puts enum members in the place of their names.

        Raises:
            ConfigError: naming field, value, and what it takes.
        """
        for name, enum in _ENUMS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in enum.__members__:
                raise ConfigError(f"{name} is {value!r}; {choices(str(value), enum.__members__)}")
            setattr(self, name, enum(value))
        if self.mixed_precision == "no":
            self.mixed_precision = None
        as_dtype(self.mixed_precision, "mixed_precision")
        for name, (is_fit, takes) in _CHECKS.items():
            if not is_fit(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes {takes}")


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{
        field.name: (lambda value: isinstance(value, bool), "True or False")
        for field in dataclasses.fields(FSDPParams)
        if isinstance(field.default, bool)
    },
    "use_orig_params": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "min_num_params": (lambda value: type(value) is int and value > 0, "a positive number"),
    "transformer_layer_cls": (
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "class names with commas between",
    ),
    "state_dict_type": (
        lambda value: value is not StateDictType.LOCAL_STATE_DICT,
        "FULL_STATE_DICT or SHARDED_STATE_DICT, because FSDP2 has no flattened pieces",
    ),
}


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
    params = _check(params)
    if not params.enable_fsdp:
        check_settings(params, "oumi replicated")
        return Replicas(model, data_parallel_mesh(device_mesh, hybrid=False))
    check_settings(params, "oumi enabled")
    for policy in (AutoWrapPolicy.SIZE_BASED_WRAP, AutoWrapPolicy.TRANSFORMER_BASED_WRAP):
        if policy is not params.auto_wrap_policy:
            check_settings(params, f"oumi without {policy.name}")
    strategy, dtype = params.sharding_strategy, as_dtype(params.mixed_precision)
    mesh = data_parallel_mesh(device_mesh, hybrid=strategy.is_hybrid)
    if strategy is ShardingStrategy.NO_SHARD:
        casts = dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in model.parameters())
        if not (params.cpu_offload or casts):
            check_settings(params, "oumi NO_SHARD")
            return Replicas(model, mesh)
        mesh = fully_replicated(mesh)
    config = config_of(
        FSDP2,
        reshard_after_forward=strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
        forward_prefetch=int(params.forward_prefetch),
        backward_prefetch=int(params.backward_prefetch is not BackwardPrefetch.NO_PREFETCH),
        param_dtype=dtype,
        reduce_dtype=dtype,
        cpu_offload=params.cpu_offload,
        sync_module_states=params.sync_module_states,
    )
    return wrap_for_trainer(model, config, mesh, _units(model, params), fp16=dtype == torch.float16)


def model_state_dict(model: nn.Module, params: FSDPParams) -> dict[str, torch.Tensor]:
    """Returns the model's state, as ``state_dict_type`` says. Every rank has to call it.

    FULL_STATE_DICT: whole tensors on the CPU, on every rank. SHARDED_STATE_DICT: DTensors of the whole model's
    tensors, which share the model's storage.
    """
    if _check(params).state_dict_type is StateDictType.FULL_STATE_DICT:
        return whole_state_dict(model)
    return dict(global_state_dict(unwrap_model(model)))


def _check(params: FSDPParams) -> FSDPParams:
    params = dataclasses.replace(params)
    params.finalize_and_validate()
    return params


def _units(model: nn.Module, params: FSDPParams) -> list[UnitChoice]:
    if params.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        return list(units_by_size(model, params.min_num_params))
    if params.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return list(units_by_class(model, params.transformer_layer_cls, "transformer_layer_cls"))
    return []
