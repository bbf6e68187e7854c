"""Oumi's `FSDPParams` and the enums in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from ...dtypes import as_dtype
from ...errors import ConfigError, MissingExtraError
from ...text import choices


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
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes True or False")
        if self.use_orig_params not in (None, True, False):
            raise ConfigError(f"use_orig_params is {self.use_orig_params!r}; it takes True, False or None")
        if self.mixed_precision == "no":
            self.mixed_precision = None
        if self.mixed_precision is not None:
            as_dtype(self.mixed_precision, "mixed_precision")
        if (
            isinstance(self.min_num_params, bool)
            or not isinstance(self.min_num_params, int)
            or self.min_num_params < 1
        ):
            raise ConfigError(f"min_num_params is {self.min_num_params!r}; it takes a positive number")
        if not isinstance(self.transformer_layer_cls, (str, type(None))) or self.transformer_layer_cls == "":
            raise ConfigError(
                f"transformer_layer_cls is {self.transformer_layer_cls!r}; it takes class names with commas between"
            )
