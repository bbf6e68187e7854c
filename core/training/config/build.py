"""Builds settings from a flat mapping of field names: sorts them into sections and expands shorthands."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from ...distributed.wrap import warn_that_fsdp2_is_used
from ...errors import ConfigError, ParallelConfigError
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
    if (ranks := given.pop("reshard_to_ranks", None)) is not None:
        if "reshard_after_forward" in given:
            raise ConfigError(f"reshard_to_ranks {ranks} and reshard_after_forward contradict each other; drop one")
        given["reshard_after_forward"] = ranks
    shares_keys, groups = given.pop("group_query_attention", None), given.get("num_query_groups")
    if shares_keys and groups is None:
        raise ConfigError("group_query_attention is given without num_query_groups; say how many groups")
    if shares_keys is False and groups is not None:
        raise ConfigError(f"group_query_attention is turned off and num_query_groups is {groups}; drop one")
    types = section_types(use_torch_fsdp2)
    fsdp2_only = _field_names(section_types(True)["ddp"]) - _field_names(section_types(False)["ddp"])
    stray = sorted(fsdp2_only & given.keys()) if not use_torch_fsdp2 else []
    if stray:
        raise ConfigError(f"{stray[0]} is a setting of FSDP2 alone; add use_torch_fsdp2, or drop it")
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
    """Returns whether `given` chooses FSDP2, and removes both of its spellings: the flag and the sharding strategy."""
    asked, strategy = given.pop("use_torch_fsdp2", None), given.get("data_parallel_sharding_strategy")
    if asked and strategy not in (None, "optim_grads_params"):
        raise ParallelConfigError(
            "use_torch_fsdp2 shards parameters, gradients and optimizer state, but data_parallel_sharding_strategy is "
            f"{strategy}; drop one of the two"
        )
    if asked is False and strategy == "optim_grads_params":
        raise ParallelConfigError(
            "use_torch_fsdp2 is turned off, but data_parallel_sharding_strategy is optim_grads_params, which means "
            "it; drop one of the two"
        )
    if strategy == "optim_grads_params" and not asked:
        warn_that_fsdp2_is_used()
    return bool(asked) or strategy == "optim_grads_params"


def is_required(entry: Field[Any]) -> bool:
    """Returns whether a field has no default, or one that only programs may rely on."""
    if entry.metadata.get("required_flag"):
        return True
    return entry.default is MISSING and entry.default_factory is MISSING


def _field_names(kind: type) -> set[str]:
    return {entry.name for entry in fields(kind)}
