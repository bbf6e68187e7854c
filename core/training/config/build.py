"""Builds settings from a flat mapping of field names: sorts them into sections and expands shorthands.

The tables of flags, names that differ from those of the fields, shorthands and headings, are in `flags.json`. Hints
for Megatron-LM's flags that do not exist here are in `base/megatron_names.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, ParallelConfigError, raise_together
from ...base.megatron_names import FOREIGN_FLAGS
from ...distributed import FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig
from ...distributed.distributed_data_parallel_config import shards_parameters
from .pretrain_config import DIVIDING_SIZES, PretrainConfig, division_violations, section_types


def build_config(values: Mapping[str, Any]) -> PretrainConfig:
    """Builds all sections from a flat mapping of field names and shorthands. Missing ones take their defaults.

    Raises:
        ConfigError: settings contradict each other, a section refuses its settings, or a required one is missing.
            Errors of several sections are one message, a line each.
    """
    settings = dict(values)
    use_torch_fsdp2 = _chooses_fsdp2(settings)
    if settings.pop("swiglu", False):
        other = settings.get("activation_func", "silu")
        if other != "silu":
            raise ConfigError(f"swiglu and activation_func {other} contradict each other; drop one")
        settings.update(gated_linear_unit=True, activation_func="silu")
    if (ranks := settings.pop("reshard_to_ranks", None)) is not None:
        if "reshard_after_forward" in settings:
            raise ConfigError(f"reshard_to_ranks {ranks} and reshard_after_forward contradict each other; drop one")
        settings["reshard_after_forward"] = ranks
    if (of_stage := settings.pop("num_layers_per_virtual_pipeline_stage", None)) is not None:
        settings["virtual_pipeline_model_parallel_size"] = _virtual_stages(settings, of_stage)
    shares_keys, groups = settings.pop("group_query_attention", None), settings.get("num_query_groups")
    if shares_keys and groups is None:
        raise ConfigError("group_query_attention is given without num_query_groups; say how many groups")
    if shares_keys is False and groups is not None:
        raise ConfigError(f"group_query_attention is turned off and num_query_groups is {groups}; drop one")
    types = section_types(use_torch_fsdp2, settings.get("data_parallel_sharding_strategy") or "no_shard")
    _reject_settings_of_others(types["ddp"], settings)
    unknown_names = sorted(settings.keys() - {name for kind in types.values() for name in _field_names(kind)})
    if unknown_names:
        raise ConfigError(f"unknown settings: {', '.join(unknown_names)}")
    sections, violations = {}, list[ConfigError]()
    for section, kind in types.items():
        own = {name: settings[name] for name in _field_names(kind) if name in settings}
        missing = [entry.name for entry in fields(kind) if is_required(entry) and entry.name not in own]
        if missing:
            raise ConfigError(f"{missing[0]} is required; give it a value")
        try:
            sections[section] = kind(**own)
        except ConfigError as error:
            violations.append(error)
    if "model" not in sections:
        violations += _division_errors(types, settings)
    raise_together(violations)
    return PretrainConfig(**sections)


def _virtual_stages(settings: Mapping[str, Any], layers: int) -> int:
    """Returns the number of stages of each pipeline rank, from the layers of each."""
    name = "num_layers_per_virtual_pipeline_stage"
    if "virtual_pipeline_model_parallel_size" in settings:
        raise ConfigError(f"{name} and num_virtual_stages_per_pipeline_rank are both given; drop one")
    total, ranks = settings.get("num_layers", 0), settings.get("pipeline_model_parallel_size", 1)
    if layers < 1 or total % (ranks * layers):
        raise ParallelConfigError(
            f"{name} {layers} x pipeline_model_parallel_size {ranks} does not divide num_layers {total}; change one "
            "of them, or give num_virtual_stages_per_pipeline_rank"
        )
    return int(total // (ranks * layers))


def _division_errors(types: Mapping[str, type], own_settings: Mapping[str, Any]) -> list[ParallelConfigError]:
    """Returns errors for sizes outside of the transformer that its ranks do not divide, to report with its own."""
    settings: dict[str, Any] = {entry.name: entry.default for kind in types.values() for entry in fields(kind)}
    settings |= own_settings
    return list(division_violations(settings)) if all(settings[name] >= 1 for name in DIVIDING_SIZES) else []


def _chooses_fsdp2(settings: dict[str, Any]) -> bool:
    """Removes `use_torch_fsdp2` from `settings`, and returns it."""
    is_fsdp2, strategy = bool(settings.pop("use_torch_fsdp2", None)), settings.get("data_parallel_sharding_strategy")
    if is_fsdp2 and strategy is not None and not shards_parameters(strategy):
        raise ParallelConfigError(
            "use_torch_fsdp2 shards parameters, gradients and optimizer state, but data_parallel_sharding_strategy is "
            f"{strategy}; drop one of the two"
        )
    return is_fsdp2


def _reject_settings_of_others(kind: type, settings: Mapping[str, Any]) -> None:
    """Raises on a setting of the wrapper that only other wrappers have."""
    own, of_fsdp2 = _field_names(kind), _field_names(TorchFullyShardedDataParallelConfig)
    stray = sorted((of_fsdp2 & settings.keys()) - own)
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


_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("flags.json").read_text("utf-8"))

OTHER_NAMES = {name: tuple(flags) for name, flags in _TABLES["other_names"].items()}
"""Fields whose flags have other names in Megatron-LM."""

NEGATED: dict[str, str] = _TABLES["negated"]
"""Fields that are on by default, with the flag that turns each off."""

NOT_FLAGS = {"params_dtype", "perform_initialization"}
"""Fields that the program sets itself, so they have no flag."""

_KINDS = {"bool": bool, "int": int}
SHORTHANDS = {name: (section, _KINDS[kind], text) for name, (section, kind, text) in _TABLES["shorthands"].items()}
"""Flags that are not fields: the section of ``--help`` that lists each one, its type and its help."""

DERIVED = {"hidden_size": ("ffn_hidden_size", "kv_channels"), "lr": ("min_lr",)}
"""By field, the fields derived from it when not given: its flag overrides a program's defaults for those."""

ALTERNATIVES = ({"lr_warmup_iters", "lr_warmup_fraction"}, {"swiglu", "activation_func"})
"""Fields that set the same thing: the flag of one overrides a program's default for another."""

TITLES: dict[str, str] = _TABLES["titles"]
"""Headings of ``--help``, by section."""


def hint_for_foreign_flag(flag: str) -> str | None:
    """Returns a line about a flag of Megatron-LM that does not exist here, or None for any other flag."""
    name = flag.lstrip("-").replace("_", "-")
    return f"Unknown option: --{name}: {FOREIGN_FLAGS[name]}" if name in FOREIGN_FLAGS else None
