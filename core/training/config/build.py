"""Builds settings from a flat mapping of field names: sorts them into sections and expands shorthands.

The tables of flags, names that differ from those of the fields, shorthands and headings, are in `flags.json`.
Megatron-LM's flags that do not exist here are in `megatron_flags.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, ParallelConfigError, raise_together
from ...distributed import FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig
from ...distributed.distributed_data_parallel_config import shards_parameters
from ...distributed.fully_sharded_data_parallel_config import FSDP2
from .pretrain_config import PretrainConfig, division_violations, section_types


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by field name with those of a higher layer in their place: a file's over a program's defaults,
    or flags over both."""
    given = {name for name, value in upper.items() if value is not None and value is not False}
    dropped = {name for group in ALTERNATIVES if group & given for name in group}
    dropped |= {name for source, targets in DERIVED.items() if source in upper for name in targets}
    if "num_attention_heads" in upper and lower.get("num_query_groups") == lower.get("num_attention_heads"):
        dropped.add("num_query_groups")  # which a run's file has without grouped queries too
    if upper.keys() & ALTERNATIVES[0]:
        # A run's file has every setting of its wrapper, of which another wrapper may not know some.
        defaults = {entry.name: entry.default for wrapper in _OTHER_WRAPPERS for entry in fields(wrapper)}
        dropped |= {name for name, value in lower.items() if defaults.get(name, MISSING) == value} - ALTERNATIVES[0]
    return {name: value for name, value in lower.items() if name not in dropped} | dict(upper)


def of_other_wrappers(settings: Mapping[str, Any]) -> set[str]:
    """Returns the names of those settings that the wrapper which they choose does not have, and another one has."""
    strategy = settings.get("data_parallel_sharding_strategy") or "no_shard"
    chosen = section_types(FSDP2 if settings.get("use_torch_fsdp2") else strategy)["ddp"]
    return settings.keys() & _field_names(TorchFullyShardedDataParallelConfig) - _field_names(chosen)


def build_config(values: Mapping[str, Any]) -> PretrainConfig:
    """Builds all sections from a flat mapping of field names and shorthands. Missing ones take their defaults.

    Raises:
        ConfigError: settings contradict each other, a section refuses its settings, or a required one is missing.
            Errors of several sections are one message, a line each.
    """
    settings = dict(values)
    strategy = settings.get("data_parallel_sharding_strategy") or "no_shard"
    if settings.pop("use_torch_fsdp2", False):
        if not shards_parameters(settings.get("data_parallel_sharding_strategy") or "optim_grads_params"):
            raise ParallelConfigError(
                "use_torch_fsdp2 shards parameters, gradients and optimizer state, but "
                f"data_parallel_sharding_strategy is {strategy}; drop one of the two"
            )
        strategy = FSDP2
    _expand_shorthands(settings)
    types = section_types(strategy)
    unknown_names = sorted(settings.keys() - {name for kind in types.values() for name in _field_names(kind)})
    for wrapper, needs in _OTHER_WRAPPERS.items():
        if stray := [name for name in unknown_names if name in _field_names(wrapper)]:
            raise ConfigError(f"{stray[0]} is a setting of {needs}, or drop it")
    if unknown_names:
        raise ConfigError(f"unknown settings: {', '.join(unknown_names)}")
    sections, violations = {}, list[ConfigError]()
    for section, kind in types.items():
        own = {name: settings[name] for name in _field_names(kind) if name in settings}
        if missing := [entry.name for entry in fields(kind) if is_required(entry) and entry.name not in own]:
            raise ConfigError(f"{missing[0]} is required; give it a value")
        try:
            sections[section] = kind(**own)
        except ConfigError as error:
            violations.append(error)
    if "model" not in sections:  # to be reported with the model's own errors
        defaults = {entry.name: entry.default for kind in types.values() for entry in fields(kind)}
        violations += division_violations(defaults | settings)
    raise_together(violations)
    return PretrainConfig(**sections)


_OTHER_WRAPPERS = {
    FullyShardedDataParallelConfig: (
        "wrappers that shard parameters; add use_torch_fsdp2, or data_parallel_sharding_strategy optim_grads_params"
    ),
    TorchFullyShardedDataParallelConfig: "FSDP2 alone; add use_torch_fsdp2",
}
"""What to do to have the settings of a class of wrappers."""


def _expand_shorthands(settings: dict[str, Any]) -> None:
    """Replaces shorthands by the settings that they mean.

    Raises:
        ConfigError: a shorthand and one of its settings, with another value.
    """
    meant: dict[str, dict[str, Any]] = {"swiglu": {}}
    if settings.pop("swiglu", False):
        settings["gated_linear_unit"] = True
        meant["swiglu"] = {"activation_func": "silu"}
    if (ranks := settings.pop("reshard_to_ranks", None)) is not None:
        meant[f"reshard_to_ranks {ranks}"] = {"reshard_after_forward": ranks}
    if (layers := settings.pop("num_layers_per_virtual_pipeline_stage", None)) is not None:
        total, ranks = settings.get("num_layers", 0), settings.get("pipeline_model_parallel_size", 1)
        name = f"num_layers_per_virtual_pipeline_stage {layers}"
        if layers < 1 or total % (ranks * layers):
            raise ParallelConfigError(
                f"{name} x pipeline_model_parallel_size {ranks} does not divide num_layers {total}; change one of "
                "them, or give num_virtual_stages_per_pipeline_rank"
            )
        meant[name] = {"virtual_pipeline_model_parallel_size": int(total // (ranks * layers))}
    for shorthand, values in meant.items():
        for name, value in values.items():
            if settings.setdefault(name, value) != value:
                flag = "num_virtual_stages_per_pipeline_rank" if name.startswith("virtual_pipeline") else name
                raise ConfigError(f"{shorthand} and {flag} {settings[name]} contradict each other; drop one")
    shares_keys, groups = settings.pop("group_query_attention", None), settings.get("num_query_groups")
    if shares_keys not in (None, groups is not None):
        state, mend = ("on", "say how many groups by num_query_groups") if shares_keys else ("off", "drop one")
        raise ConfigError(f"group_query_attention is turned {state} and num_query_groups is {groups}; {mend}")


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

_KINDS = {"bool": bool, "int": int, "paths": tuple[Path, ...]}
SHORTHANDS = {name: (section, _KINDS[kind], text) for name, (section, kind, text) in _TABLES["shorthands"].items()}
"""Flags that are not fields: the section of ``--help`` that lists each one, its type and its help."""

DERIVED: dict[str, list[str]] = _TABLES["derived"]
"""By field, the fields derived from it when not given: a higher layer's value drops lower layers' values of those."""

ALTERNATIVES = tuple(map(frozenset, _TABLES["alternatives"]))
"""Fields that set the same thing, first those that choose the wrapper: a higher layer's value of one drops the values
of the others in lower layers."""

TITLES: dict[str, str] = _TABLES["titles"]
"""Headings of ``--help``, by section."""
