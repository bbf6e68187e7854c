"""Makes command-line flags from the fields of `PretrainConfig`'s sections.

A field gives its flag the name (``num_layers`` -> ``--num-layers``), type, default and, by the docstring under it, the
help. A field of several sections is one flag that sets them all. The few flags whose name in Megatron-LM differs from
the field are in the tables below. cyclopts parses flags and prints help.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from ...errors import ConfigError, MissingExtraError
from ..launch.environment import environment_rank
from .build import build_config, is_required
from .foreign_flags import hint_for_foreign_flag
from .pretrain_config import PretrainConfig, section_types

Result = TypeVar("Result")

_OTHER_NAMES = {
    "layernorm_epsilon": ("--norm-epsilon",),
    "bucket_size": ("--ddp-bucket-size",),
    "average_in_collective": ("--ddp-average-in-collective",),
    "grad_reduce_in_fp32": ("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-fp32"),
    "deterministic": ("--deterministic", "--deterministic-mode"),
    "use_checkpoint_opt_param_scheduler": ("--use-checkpoint-opt_param-scheduler",),
    "override_opt_param_scheduler": ("--override-opt_param-scheduler",),
}
_NEGATED = {  # fields that are on by default: the flag turns them off
    "add_bias_linear": "--disable-bias-linear",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
_NOT_FLAGS = {"params_dtype", "perform_initialization"}  # decided by the run, not by its user
_SHORTHANDS: dict[str, tuple[str, Any, str]] = {
    "use_torch_fsdp2": (
        "ddp",
        bool,
        "Wrap the model in PyTorch's FSDP2: parameters, gradients and optimizer state sharded.",
    ),
    "reshard_to_ranks": (
        "ddp",
        int,
        "`--reshard-after-forward` to a number: between forward and backward keep each parameter whole among so many "
        "ranks, a divisor of those that share it.",
    ),
    "swiglu": ("model", bool, "The MLP is SwiGLU: `--gated-linear-unit --activation-func silu`."),
    "group_query_attention": (
        "model",
        bool,
        "Share key and value heads between query heads; needs `--num-query-groups`.",
    ),
}
_DERIVED = {"hidden_size": ("ffn_hidden_size", "kv_channels"), "lr": ("min_lr",)}
"""Fields derived from another one if not given: a flag of that field overrides a program's default for these."""

_ALTERNATIVES = ({"lr_warmup_iters", "lr_warmup_fraction"}, {"swiglu", "activation_func"})
"""Alternatives: a flag for one overrides a program's default for another."""

_TITLES = {
    "model": "Transformer",
    "gpt": "Embeddings, and what is trained",
    "ddp": "Data-parallel wrapper",
    "optimizer": "Optimizer",
    "scheduler": "Learning-rate schedule",
    "data": "Data",
    "checkpoint": "Checkpoints",
    "run": "Run",
}


def parse_arguments(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, *, description: str = "", name: str = ""
) -> PretrainConfig:
    """Builds a run's settings from command-line flags.

    Args:
        arguments: the command line after the program's name.
        defaults: a program's defaults by field name, which replace those of the dataclasses.
        description: first paragraph of ``--help``, which only the first rank prints, and which ends the program.

    Raises:
        ConfigError: a flag is unknown, a value has the wrong type, or a section refuses its settings.
        MissingExtraError: cyclopts is not installed.
    """
    given = parse_call(_collector(dict(defaults or {})), arguments, description=description, name=name)
    taken = {name for group in _ALTERNATIVES if group & given.keys() for name in group}
    taken |= {name for source, derived in _DERIVED.items() if source in given for name in derived}
    return build_config({name: value for name, value in (defaults or {}).items() if name not in taken} | given)


def parse_call(
    function: Callable[..., Result], arguments: Sequence[str], *, description: str | None = None, name: str = ""
) -> Result:
    """Calls `function` with keyword arguments parsed from a command line; returns its result.

    Args:
        description: first paragraph of ``--help``; None takes the function's docstring.

    Raises:
        ConfigError: a flag is unknown, or a value has the wrong type.
        MissingExtraError: cyclopts is not installed.
    """
    cyclopts = _library("cyclopts")
    app = cyclopts.App(
        name=name,
        help=description,
        version_flags=[],
        help_format="plaintext",
        default_parameter=cyclopts.Parameter(allow_repeating=True),  # the last one wins, as in Megatron-LM's parser
    )
    app.default(function)
    if {"-h", "--help"} & set(arguments):
        if environment_rank() == 0:
            app.help_print([])
        raise SystemExit(0)
    try:
        _, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    except cyclopts.UnknownOptionError as error:
        hint = hint_for_foreign_flag(error.token.keyword or "")
        raise ConfigError(hint or " ".join(str(error).split())) from None
    except cyclopts.UnusedCliTokensError as error:
        stray = " ".join(map(repr, error.unused_tokens or []))
        raise ConfigError(f"unexpected value {stray}; every value follows its flag, see --help") from None
    except cyclopts.CycloptsError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    return function(*bound.args, **bound.kwargs)


def flag_documentation(kind: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass and its bases, by field name.

    Raises:
        MissingExtraError: docstring_parser, which cyclopts brings, is not installed.
    """
    parse = _library("docstring_parser").parse_from_object
    documented = [text for base in reversed(kind.__mro__[:-1]) for text in parse(base).params]
    return {text.arg_name: " ".join(text.description.split()) for text in documented}


def _collector(defaults: dict[str, Any]) -> Any:
    """Returns a function whose keyword parameters are the flags, for cyclopts to read from its signature."""
    cyclopts = _library("cyclopts")
    groups = {name: cyclopts.Group.create_ordered(title) for name, title in _TITLES.items()}
    parameters: dict[str, inspect.Parameter] = {}

    def add(flag: str, section: str, kind: Any, default: Any, **settings: Any) -> None:
        if tuple in (get_origin(kind), *map(get_origin, get_args(kind))):
            settings["consume_multiple"] = True
        if kind in (int, int | None):
            settings["converter"] = _integer if kind is int and default is not None else _integer_or_none
        parameter = cyclopts.Parameter(group=groups[section], **settings)
        annotation: Any = Annotated[kind if default is not None else kind | None, parameter]
        parameters[flag] = inspect.Parameter(
            flag, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(flag, default), annotation=annotation
        )

    for name, (section, kind, text) in _SHORTHANDS.items():
        add(name, section, kind, False if kind is bool else None, help=text)
    common = section_types(use_torch_fsdp2=False)
    for section, kind in section_types(use_torch_fsdp2=True).items():
        # FSDP2 narrows some settings of every wrapper: the flag's help is that of the wider one.
        hints = get_type_hints(kind)
        texts = flag_documentation(kind) | flag_documentation(common[section])
        entries = {entry.name: entry for entry in (*fields(kind), *fields(common[section]))}
        for name, entry in entries.items():
            if name in _NOT_FLAGS or name in parameters or entry.metadata.get("is_code"):
                continue
            settings: dict[str, Any] = {"help": texts.get(name)}
            if name in _NEGATED:
                # Keep the positive name too, so that either value can override a program's default.
                settings.update(name=f"--{name.replace('_', '-')}", negative=_NEGATED[name])
            elif name in _OTHER_NAMES:
                settings["name"] = _OTHER_NAMES[name]
            add(
                name,
                section,
                bool if name in _NEGATED else _flag_type(hints[name]),
                inspect.Parameter.empty if is_required(entry) else entry.default,
                **settings,
            )

    def collect(**flags: Any) -> dict[str, Any]:
        return flags

    collect.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    collect.__annotations__ = {}
    return collect


def _integer_or_none(kind: Any, tokens: Sequence[Any]) -> int | None:
    return None if tokens[0].value.lower() == "none" else _integer(kind, tokens)


def _integer(_: Any, tokens: Sequence[Any]) -> int:
    """Converts an integer strictly; cyclopts itself would round 1.5 to 2."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'"{text}" is not an integer.') from None


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError(name, "train", "Reading command-line flags") from None


def _flag_type(hint: Any) -> Any:
    """Returns the type of a field's flag: a dtype is given by name, and a function is left out."""
    if torch.dtype in get_args(hint):
        return str | None
    values = [kind for kind in get_args(hint) if get_origin(kind) is not Callable]
    return values[0] if get_args(hint) and get_origin(hint) in (Union, UnionType) and len(values) == 1 else hint
