"""Oumi's `FSDPParams` become this library's wrappers: `prepare_model` translates them, by tables.

A ``fsdp:`` block with its fields, defaults and values is read, checked, and made into replicas or FSDP2's settings;
state dicts go out and in by its ``state_dict_type``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import device
from ..dist_checkpointing import load_model_state_dict as load_whole_or_sharded
from ..dist_checkpointing import model_state_dict as global_state_dict
from ..dist_checkpointing.global_view import local_tensor
from ..distributed import _BaseDataParallel
from ..distributed.data_parallel_base import unwrap_model
from ..distributed.plan.units import UnitChoice
from ..dtypes import as_dtype
from ..errors import CheckpointError, ConfigError, MissingExtraError
from ..text import choices
from .bridge.checkpoints import whole_state_dict
from .bridge.meshes import data_parallel_mesh, fully_replicated
from .bridge.translation import FSDP2, config_of, honoured, ignored, translate
from .bridge.units import units_by_class, units_by_size
from .bridge.wrapping import Replicas, wrap_for_trainer


class ShardingStrategy(str, Enum):
    """Oumi's sharding strategies."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"

    def to_torch(self) -> torch_fsdp.ShardingStrategy:
        """Returns torch's member of this name."""
        is_private = self is ShardingStrategy.HYBRID_SHARD_ZERO2
        return torch_fsdp.ShardingStrategy["_HYBRID_SHARD_ZERO2" if is_private else self.value]

    @property
    def is_hybrid(self) -> bool:
        """Sharded within, replicated across machines."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def frees_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class StateDictType(str, Enum):
    """Oumi's forms of a state dict; see `model_state_dict`."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"

    def to_torch(self) -> torch_fsdp.StateDictType:
        """Returns torch's member of this name."""
        return torch_fsdp.StateDictType[self.value]


class BackwardPrefetch(str, Enum):
    """When backward gathers the parameters that it needs next."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NO_PREFETCH = "NO_PREFETCH"

    def to_torch(self) -> torch_fsdp.BackwardPrefetch | None:
        """Returns torch's member of this name; none of them for no prefetch."""
        return None if self is BackwardPrefetch.NO_PREFETCH else torch_fsdp.BackwardPrefetch[self.value]


class AutoWrapPolicy(str, Enum):
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
_FLAGS = ("enable_fsdp", "cpu_offload", "forward_prefetch", "sync_module_states")


@dataclass
class FSDPParams:
    """The ``fsdp:`` block of an oumi config; fields, defaults and values are oumi's.

    Enum values may be given by name; `finalize_and_validate` rejects unknown names.
    """

    enable_fsdp: bool = False
    """Shard by `sharding_strategy`; else the model is replicated, and the other fields are without effect."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """FULL_SHARD and HYBRID_SHARD free parameters after forward, SHARD_GRAD_OP and HYBRID_SHARD_ZERO2 do not."""

    cpu_offload: bool = False
    """Keep shards in the host's memory."""

    mixed_precision: str | None = None
    """Dtype of computation and reduction: ``bf16``, ``fp16`` or ``fp32``; None is that of the parameters."""

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    """BACKWARD_PRE gathers one unit ahead in backward, NO_PREFETCH none; BACKWARD_POST is run as the first."""

    forward_prefetch: bool = False
    """Gather one unit ahead in forward."""

    use_orig_params: bool | None = None
    """FSDP2 keeps the original parameters in any case."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    """Form of `model_state_dict`: whole tensors, DTensors, or this rank's local pieces."""

    auto_wrap_policy: AutoWrapPolicy = AutoWrapPolicy.NO_WRAP
    """Units by parameter count, by the class of the transformer's layers, or the model as one."""

    min_num_params: int = 100_000
    """Parameters that a unit of SIZE_BASED_WRAP has at least, those of units inside it not counted."""

    transformer_layer_cls: str | None = None
    """Class names for TRANSFORMER_BASED_WRAP, with commas between, plain or dotted; found by itself when None."""

    sync_module_states: bool = True
    """Begin with the first rank's values."""

    def __post_init__(self) -> None:
        for name, enum in _ENUMS.items():  # what is no member is said by finalize_and_validate
            setattr(self, name, enum.__members__.get(str(getattr(self, name)), getattr(self, name)))

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> FSDPParams:
        """Reads the block itself, or a whole config that has it under ``fsdp``; checked.

        Raises:
            ConfigError: an unknown field or value.
        """
        block = block.get("fsdp", block) if isinstance(block.get("fsdp"), Mapping) else block
        names = [field.name for field in dataclasses.fields(cls)]
        for name in block:
            if name not in names:
                raise ConfigError(f"the fsdp block has {name!r}; {choices(str(name), names)}")
        params = cls(**block)
        params.finalize_and_validate()
        return params

    @classmethod
    def from_yaml(cls, source: str | Path) -> FSDPParams:
        """Reads a YAML file, or the text of one; see `from_dict`.

        Raises:
            ConfigError: the text is not a block, or has an unknown field or value.
            MissingExtraError: PyYAML is not installed.
        """
        try:
            import yaml
        except ImportError as error:
            raise MissingExtraError("pyyaml", "hf", "reading an oumi config") from error
        is_text = isinstance(source, str) and ("\n" in source or ":" in source)
        block = yaml.safe_load(source if is_text else Path(source).read_text(encoding="utf-8"))
        if not isinstance(block, Mapping):
            raise ConfigError(f"the oumi config is a {type(block).__name__}; it takes a block of fields")
        return cls.from_dict(block)

    def finalize_and_validate(self) -> None:
        """Checks every field, and puts enum members in the place of their names.

        Raises:
            ConfigError: naming field, value, and what it takes.
        """
        for name, enum in _ENUMS.items():
            value = getattr(self, name)
            if not isinstance(value, enum):
                if not isinstance(value, str) or value not in enum.__members__:
                    raise ConfigError(f"{name} is {value!r}; {choices(str(value), enum.__members__)}")
                setattr(self, name, enum[value])
        if self.mixed_precision == "no":
            self.mixed_precision = None
        as_dtype(self.mixed_precision, "mixed_precision")
        for names, is_fit, takes in _CHECKS:
            for name in names:
                if not is_fit(getattr(self, name)):
                    raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes {takes}")


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_FLAGS, lambda value: isinstance(value, bool), "True or False"),
    (("use_orig_params",), lambda value: value in (None, True, False), "True, False or None"),
    (("min_num_params",), lambda value: type(value) is int and value > 0, "a positive number"),
    (
        ("transformer_layer_cls",),
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "class names with commas between",
    ),
)
_REPLICATED = tuple(
    ignored(field.name, "enable_fsdp is False, and the model is replicated")
    for field in dataclasses.fields(FSDPParams)
)
_UNSHARDED = tuple(
    ignored(name, "under NO_SHARD replicas hold the whole model, and begin with the first rank's values")
    for name in ("backward_prefetch", "forward_prefetch", "auto_wrap_policy", "state_dict_type", "sync_module_states")
)
_ENABLED = (
    ignored(
        "use_orig_params",
        "FSDP2 shards each original parameter by itself in any case",
        lambda value: value is not None,
    ),
    ignored(
        "backward_prefetch",
        "FSDP2 gathers the next unit before a unit's gradients, as BACKWARD_PRE says",
        lambda value: value is BackwardPrefetch.BACKWARD_POST,
    ),
)
_OF_POLICY = {
    AutoWrapPolicy.SIZE_BASED_WRAP: ignored("min_num_params", "it is about auto_wrap_policy SIZE_BASED_WRAP"),
    AutoWrapPolicy.TRANSFORMER_BASED_WRAP: ignored(
        "transformer_layer_cls", "it is about auto_wrap_policy TRANSFORMER_BASED_WRAP"
    ),
}
_SHARDED = (
    honoured("sharding_strategy", "reshard_after_forward", lambda strategy: strategy.frees_after_forward),
    honoured("forward_prefetch", value=int),
    honoured("backward_prefetch", value=lambda kind: int(kind is not BackwardPrefetch.NO_PREFETCH)),
    honoured("mixed_precision", "param_dtype", as_dtype),
    honoured("mixed_precision", "reduce_dtype", as_dtype),
    honoured("cpu_offload"),
    honoured("sync_module_states"),
)


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
    params = _checked(params)
    if not params.enable_fsdp:
        translate(params, _REPLICATED)
        return Replicas(model, data_parallel_mesh(device_mesh, hybrid=False))
    translate(
        params, (*_ENABLED, *(row for policy, row in _OF_POLICY.items() if policy is not params.auto_wrap_policy))
    )
    strategy, dtype = params.sharding_strategy, as_dtype(params.mixed_precision)
    mesh = data_parallel_mesh(device_mesh, hybrid=strategy.is_hybrid)
    if strategy is ShardingStrategy.NO_SHARD:
        if not (params.cpu_offload or (dtype is not None and _casts(model, dtype))):
            translate(params, _UNSHARDED)
            return Replicas(model, mesh)
        mesh = fully_replicated(mesh)
    config = config_of(FSDP2, params, _SHARDED, pin_memory=device.device_type() != "cpu")
    return wrap_for_trainer(model, config, mesh, _units(model, params), fp16=dtype == torch.float16)


def model_state_dict(model: nn.Module, params: FSDPParams) -> dict[str, torch.Tensor]:
    """Returns the model's state, as ``state_dict_type`` says; every rank has to call it.

    FULL_STATE_DICT: whole tensors on the CPU, on every rank. SHARDED_STATE_DICT: DTensors of the whole model's
    tensors, which share the model's storage. LOCAL_STATE_DICT: this rank's pieces, sharing it too.
    """
    kind = _checked(params).state_dict_type
    if kind is StateDictType.FULL_STATE_DICT:
        return whole_state_dict(model)
    view = global_state_dict(unwrap_model(model))
    is_local = kind is StateDictType.LOCAL_STATE_DICT
    return {name: local_tensor(tensor) if is_local else tensor for name, tensor in view.items()}


def load_model_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor], params: FSDPParams) -> None:
    """Copies what `model_state_dict` gave, under the same ``state_dict_type``, into the model.

    Raises:
        CheckpointError: names or shapes that differ; nothing has been written then.
    """
    module = unwrap_model(model)
    if _checked(params).state_dict_type is not StateDictType.LOCAL_STATE_DICT:
        load_whole_or_sharded(module, state_dict)
        return
    own = {name: local_tensor(tensor) for name, tensor in global_state_dict(module).items()}
    shapes, given = ({name: tensor.shape for name, tensor in of.items()} for of in (own, state_dict))
    wrong = {name for name, _ in shapes.items() ^ given.items()}
    if wrong:
        raise CheckpointError(
            f"LOCAL_STATE_DICT holds pieces of one rank's own cut, and these differ from the model's: "
            f"{', '.join(sorted(wrong))}; load it where and as it was saved, or save FULL_STATE_DICT"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state_dict[name])


def _checked(params: FSDPParams) -> FSDPParams:
    params = dataclasses.replace(params)
    params.finalize_and_validate()
    return params


def _units(model: nn.Module, params: FSDPParams) -> list[UnitChoice]:
    if params.auto_wrap_policy is AutoWrapPolicy.SIZE_BASED_WRAP:
        return list(units_by_size(model, params.min_num_params))
    if params.auto_wrap_policy is AutoWrapPolicy.TRANSFORMER_BASED_WRAP:
        return list(units_by_class(model, params.transformer_layer_cls, "transformer_layer_cls"))
    return []


def _casts(model: nn.Module, dtype: torch.dtype) -> bool:
    return any(parameter.is_floating_point() and parameter.dtype != dtype for parameter in model.parameters())
