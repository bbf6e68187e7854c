"""Reads Megatron-LM's command lines: its flags that do not exist here, and its defaults where ours differ.

The tables are in `megatron_flags.json`. Names in them are without dashes, may be shell patterns, and are separated by
spaces: ``signs`` (flags of ours that only a line of Megatron-LM's has), ``replaced`` (by flags of ours), ``switches``
and ``valued`` (change no number here, without and with values), and ``refused``, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("megatron_flags.json").read_text("utf-8"))
_SIGNS, _SWITCHES, _VALUED = (_TABLES[name].split() for name in ("signs", "switches", "valued"))
_VOCABULARY_MULTIPLE = 128


@dataclass
class CommandLine:
    """A command line without the flags that change no number here."""

    words: list[str] = field(default_factory=list)
    """Flags of ours, with values, and unknown ones."""
    ignored: list[str] = field(default_factory=list)
    """Names of flags that were taken out."""
    signs: list[str] = field(default_factory=list)
    """Flags that only a command line of Megatron-LM's has."""


def sort_flags(arguments: Sequence[str], known: Collection[str]) -> CommandLine:
    """Takes those flags out of a command line that change no number here, and replaces those that others stand for.

    Args:
        known: names of the flags that exist, with their dashes.
    """
    line = CommandLine()
    replaced: list[str] = []
    target = line.words
    for word in arguments:
        name = flag_name(word)
        if name in known or not word.startswith("--"):
            target = line.words if word.startswith("--") else target
            target.append(word)
        elif name[2:] in _TABLES["replaced"]:
            target = line.words
            replaced += _TABLES["replaced"][name[2:]].split()
        elif (has_value := _matches(name, _VALUED)) or _matches(name, _SWITCHES):
            line.ignored.append(name)
            target = [] if has_value else line.words
        else:
            target = line.words
            target.append(word)
            continue
        if word.startswith("--") and (name not in known or name[2:] in _SIGNS):
            line.signs.append(name)
    line.words = [*replaced, *line.words]  # an explicit flag wins
    return line


def flag_name(word: str) -> str:
    """Returns the name of a flag as it is shown, of a word that may have its value after ``=``."""
    return word.partition("=")[0].replace("_", "-")


def refusal(flag: str) -> str:
    """Returns why a flag of Megatron-LM's is refused, and what to do instead; empty for a flag that it does not
    have."""
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
    """
    values = dict(settings)
    tensor_parallel = values.get("tensor_model_parallel_size", 1)
    if tensor_parallel == 1:
        values.pop("sequence_parallel", None)
    if values.get("data_parallel_sharding_strategy", "no_shard") != "no_shard":
        values.pop("use_distributed_optimizer", None)  # which --use-megatron-fsdp sets, and a strategy says more
    if flags.get("attention_backend") == "fused":
        values["attention_backend"] = "auto"  # not every device has this kernel, and torch takes it where it is best
    if values.get("bf16"):
        values.setdefault("grad_reduce_in_fp32", True)
    if values.get("swiglu"):
        values.setdefault("ffn_hidden_size", values.get("hidden_size", 0) * 8 // 3 // 64 * 64)
    elif values.get("add_bias_linear", True) and "--no-bias-gelu-fusion" not in ignored:
        values.setdefault("activation_func", "gelu_tanh")  # the formula of its fused kernel
    if values.get("group_query_attention"):
        values.setdefault("num_query_groups", 1)
    elif "num_query_groups" in flags:
        del values["num_query_groups"]
    if "keep_every" in flags:  # Megatron-LM's --save-retain-interval
        values.setdefault("keep_last", 1)
    if values.get("optimizer") == "muon":
        values.setdefault("muon_preset", "megatron")
    if values.get("wandb_project") and "wandb" not in values.get("trackers", ()):
        values["trackers"] = (*values.get("trackers", ()), "wandb")
    if "split" in flags:
        values["split"] = flags["split"].strip("'\"")
    if "make_vocab_size_divisible_by" in flags or "make_vocab_size_divisible_by" not in values:
        multiple = flags.get("make_vocab_size_divisible_by", _VOCABULARY_MULTIPLE)
        values["make_vocab_size_divisible_by"] = multiple * tensor_parallel
    return values
