"""Builds settings from a flat mapping of field names: sorts them into sections and expands shorthands."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from ...distributed import FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig
from ...distributed.distributed_data_parallel_config import shards_parameters
from ...errors import ConfigError, ParallelConfigError
from .flag_names import AS_NUMBER
from .pretrain_config import PretrainConfig, division_violations, section_types


def build_config(values: Mapping[str, Any]) -> PretrainConfig:
    """Builds all sections from a flat mapping of field names and shorthands; missing ones take their defaults.

    Raises:
        ConfigError: settings contradict each other, a section refuses its settings, or a required one is missing.
            Errors of several sections are one message, a line each.
    """
    given = dict(values)
    use_torch_fsdp2 = _chooses_fsdp2(given)
    if given.pop("swiglu", False):
        other = given.get("activation_func", "silu")
        if other != "silu":
            raise ConfigError(f"swiglu and activation_func {other} contradict each other; drop one")
        given.update(gated_linear_unit=True, activation_func="silu")
    for shorthand, name in AS_NUMBER.items():
        if (number := given.pop(shorthand, None)) is not None:
            if name in given:
                raise ConfigError(f"{shorthand} {number} and {name} contradict each other; drop one")
            given[name] = number
    shares_keys, groups = given.pop("group_query_attention", None), given.get("num_query_groups")
    if shares_keys and groups is None:
        raise ConfigError("group_query_attention is given without num_query_groups; say how many groups")
    if shares_keys is False and groups is not None:
        raise ConfigError(f"group_query_attention is turned off and num_query_groups is {groups}; drop one")
    types = section_types(use_torch_fsdp2, given.get("data_parallel_sharding_strategy") or "no_shard")
    _reject_settings_of_others(types["ddp"], given)
    unknown = sorted(given.keys() - {name for kind in types.values() for name in _field_names(kind)})
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)}")
    sections, violations = {}, list[ConfigError]()
    for section, kind in types.items():
        own = {name: given[name] for name in _field_names(kind) if name in given}
        missing = [entry.name for entry in fields(kind) if is_required(entry) and entry.name not in own]
        if missing:
            raise ConfigError(f"{missing[0]} is required; give it a value")
        try:
            sections[section] = kind(**own)
        except ConfigError as error:
            violations.append(error)
    if violations:
        violations += _division_errors(types, given) if "model" not in sections else []
        is_parallel = all(isinstance(violation, ParallelConfigError) for violation in violations)
        raise (ParallelConfigError if is_parallel else ConfigError)(
            "\n".join(str(violation) for violation in violations)
        )
    return PretrainConfig(**sections)


def _division_errors(types: Mapping[str, type], given: Mapping[str, Any]) -> list[ParallelConfigError]:
    """Returns errors for sizes outside of the transformer that its ranks do not divide, to report with its own."""
    defaults = {entry.name: entry.default for kind in types.values() for entry in fields(kind)}
    names = inspect.signature(division_violations).parameters
    values = {name: given.get(name, defaults[name]) for name in names}
    sizes = [value for name, value in values.items() if name not in ("sequence_parallel", "vocab_size")]
    return list(division_violations(**values)) if min(sizes) >= 1 else []


def _chooses_fsdp2(given: dict[str, Any]) -> bool:
    """Removes `use_torch_fsdp2` from `given`, and returns it."""
    asked, strategy = bool(given.pop("use_torch_fsdp2", None)), given.get("data_parallel_sharding_strategy")
    if asked and strategy is not None and not shards_parameters(strategy):
        raise ParallelConfigError(
            "use_torch_fsdp2 shards parameters, gradients and optimizer state, but data_parallel_sharding_strategy is "
            f"{strategy}; drop one of the two"
        )
    return asked


def _reject_settings_of_others(chosen: type, given: Mapping[str, Any]) -> None:
    """Raises on a setting of the wrapper that only other wrappers have."""
    own, of_fsdp2 = _field_names(chosen), _field_names(TorchFullyShardedDataParallelConfig)
    stray = sorted((of_fsdp2 & given.keys()) - own)
    if stray and stray[0] in _field_names(FullyShardedDataParallelConfig):
        raise ConfigError(
            f"{stray[0]} is a setting of wrappers that shard parameters; add use_torch_fsdp2, or "
            "data_parallel_sharding_strategy optim_grads_params, or drop it"
        )
    if stray:
        raise ConfigError(f"{stray[0]} is a setting of FSDP2 alone; add use_torch_fsdp2, or drop it")


def is_required(entry: Field[Any]) -> bool:
    """Returns whether a field has no default, or one that only programs may rely on."""
    if entry.metadata.get("required_flag"):
        return True
    return entry.default is MISSING and entry.default_factory is MISSING


def _field_names(kind: type) -> set[str]:
    return {entry.name for entry in fields(kind)}
