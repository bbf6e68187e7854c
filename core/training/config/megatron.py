"""Reads Megatron-LM's command lines: its flags that do not exist here, and its defaults where ours differ.

The tables are in `megatron_flags.json`. Names in them are without dashes, may be shell patterns, and are separated by
spaces: ``signs`` (flags of ours that only a line of Megatron-LM's has), ``replaced`` (by flags of ours), ``switches``
and ``valued`` (change no number here, without and with values), and ``refused``, with the reason. ``implied`` has, for
a setting and its value, what Megatron-LM's parser sets with it unless it is given.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("megatron_flags.json").read_text("utf-8"))
_FOREIGN = {kind: [*_TABLES[kind]] for kind in ("replaced", "switches", "valued")}


def sort_flags(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Takes those flags out of a command line that change no number here, and replaces those that others stand for.

    Args:
        known: names of the flags that exist, with their dashes.

    Returns:
        The words that are left, unknown flags included; names of the flags that were taken out; and names of those
        that only a command line of Megatron-LM's has.
    """
    words, replaced, ignored, signs = list[str](), list[str](), list[str](), list[str]()
    target = words
    for word in arguments:
        if not word.startswith("--"):
            target.append(word)
            continue
        name = flag_name(word)
        kind = "" if name in known else next((kind for kind, names in _FOREIGN.items() if _matches(name, names)), "")
        kind = "" if "=" in word and kind != "valued" else kind  # a switch takes no value: it is reported as unknown
        target = [] if kind == "valued" else words
        if kind == "replaced":
            replaced += _TABLES["replaced"][name[2:]].split()
        elif kind:
            ignored.append(name)
        else:
            words.append(word)
        if kind or _matches(name, _TABLES["signs"]):
            signs.append(name)
    return [*replaced, *words], ignored, signs  # an explicit flag wins


def flag_name(word: str) -> str:
    """Returns the name of a flag as it is shown, of a word that may have its value after ``=``."""
    return word.partition("=")[0].replace("_", "-")


def refusal(flag: str) -> str:
    """Returns why a flag of Megatron-LM's is refused, and what to do instead. Empty for others."""
    return next((text for names, text in _TABLES["refused"].items() if _matches(flag, names.split())), "")


def _matches(flag: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(flag.lstrip("-"), pattern) for pattern in patterns)


def with_megatron_defaults(
    settings: Mapping[str, Any], flags: Mapping[str, Any], ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the settings that Megatron-LM's parser would make of a command line, where ours would differ.

    Args:
        settings: of files and flags, by field name.
        flags: those of the command line alone. Settings of a file are final.
        ignored: names of flags that `sort_flags` took out.

    Raises:
        ConfigError: positions are switched off by a flag that Megatron-LM's parser takes with rotary ones alone.
    """
    if "--no-position-embedding" in ignored and settings.get("position_embedding_type") != "rope":
        raise ConfigError(
            "--no-position-embedding is given, and the position embedding type is not rope; a model without positions "
            "is not here: give --position-embedding-type rope, or drop the flag"
        )
    values, tensor_parallel = dict(settings), settings.get("tensor_model_parallel_size", 1)
    for name, value, implied in _TABLES["implied"]:
        if name in values and value in (None, values[name]):
            values = implied | values
    if tensor_parallel == 1:
        values.pop("sequence_parallel", None)
    if values.get("data_parallel_sharding_strategy", "no_shard") != "no_shard":
        values.pop("use_distributed_optimizer", None)  # which --use-megatron-fsdp sets, and a strategy says more
    if flags.get("attention_backend") == "fused":
        values["attention_backend"] = "auto"  # not every device has this kernel, and torch takes it where it is best
    if values.get("swiglu"):
        values.setdefault("ffn_hidden_size", values.get("hidden_size", 0) * 8 // 3 // 64 * 64)
    elif values.get("add_bias_linear", True) and "--no-bias-gelu-fusion" not in ignored:
        values.setdefault("activation_func", "gelu_tanh")  # the formula of its fused kernel
    # Under a dynamic loss scale overflows are normal.
    values.setdefault("check_for_nan_in_grad", not values.get("fp16") or bool(values.get("loss_scale")))
    if "num_query_groups" in flags and not values.get("group_query_attention"):
        del values["num_query_groups"]
    if "split" in flags:
        values["split"] = flags["split"].strip("'\"")
    if (multiple := flags.get("make_vocab_size_divisible_by")) or "make_vocab_size_divisible_by" not in values:
        values["make_vocab_size_divisible_by"] = (multiple or 128) * tensor_parallel
    return values
