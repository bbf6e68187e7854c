"""Command-line flags, made from the fields of `PretrainConfig`'s sections; nobody writes one out by hand.

A field gives its flag the name (``num_layers`` -> ``--num-layers``), type, default and, by the docstring under it, the
help. A field that several sections have is one flag that sets them all. The few flags that Megatron-LM calls by
another name than the field stand in the tables below. Parsing and help are done by cyclopts.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from ...distributed.wrap import say_that_fsdp2_stands_in
from ...errors import ConfigError, MissingExtraError, ParallelConfigError
from ..launch.environment import environment_rank
from .foreign_flags import hint_for_foreign_flag
from .pretrain_config import PretrainConfig, division_violations, section_types

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
"""What follows from another field where it is not given: a program's default for it gives way when that one is."""

_ALTERNATIVES = ({"lr_warmup_iters", "lr_warmup_fraction"}, {"swiglu", "activation_func"})
"""Ways to say the same: a program's default for one gives way to the flag of another."""

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
        defaults: by field name, a program's own defaults in place of those of the dataclasses.
        description: first paragraph of ``--help``, which is printed by the first rank alone and ends the program.

    Raises:
        ConfigError: an unknown flag, a value of the wrong type, or settings that a section refuses.
        MissingExtraError: cyclopts is not installed.
    """
    given = parse_call(_collector(dict(defaults or {})), arguments, description=description, name=name)
    taken = {name for group in _ALTERNATIVES if group & given.keys() for name in group}
    taken |= {name for source, derived in _DERIVED.items() if source in given for name in derived}
    return build_config({name: value for name, value in (defaults or {}).items() if name not in taken} | given)


def parse_call(
    function: Callable[..., Result], arguments: Sequence[str], *, description: str | None = None, name: str = ""
) -> Result:
    """Calls `function`, whose keyword parameters are the flags, as a command line asks; returns what it returns.

    Args:
        description: first paragraph of ``--help``; None takes the function's docstring.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong type.
        MissingExtraError: cyclopts is not installed.
    """
    cyclopts = _library()
    app = cyclopts.App(
        name=name,
        help=description,
        version_flags=[],
        help_format="plaintext",
        default_parameter=cyclopts.Parameter(allow_repeating=True),  # the last counts, as in Megatron-LM's parser
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


def build_config(values: Mapping[str, Any]) -> PretrainConfig:
    """Sections from a flat mapping of field names, shorthands included; what is left out takes its default.

    Raises:
        ConfigError: settings that contradict each other or that a section refuses, or a required one that is missing.
            What several sections refuse is told together, a line each.
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
        missing = [entry.name for entry in fields(kind) if _is_required(entry) and entry.name not in own]
        if missing:
            raise ConfigError(f"{missing[0]} is required; give it a value")
        try:
            sections[section] = kind(**own)
        except ConfigError as error:
            violations.append(error)
    if violations:
        violations += _divisions_beside(types, given) if "model" not in sections else []
        is_parallel = all(isinstance(violation, ParallelConfigError) for violation in violations)
        raise (ParallelConfigError if is_parallel else ConfigError)(
            "\n".join(str(violation) for violation in violations)
        )
    return PretrainConfig(**sections)


def _divisions_beside(types: Mapping[str, type], given: Mapping[str, Any]) -> list[ParallelConfigError]:
    """Sizes beside the transformer's that its ranks do not divide, told with those of the transformer."""
    defaults = {entry.name: entry.default for kind in types.values() for entry in fields(kind)}
    names = inspect.signature(division_violations).parameters
    values = {name: given.get(name, defaults[name]) for name in names}
    sizes = [value for name, value in values.items() if name not in ("sequence_parallel", "vocab_size")]
    return list(division_violations(**values)) if min(sizes) >= 1 else []


def _chooses_fsdp2(given: dict[str, Any]) -> bool:
    """Takes `use_torch_fsdp2` out of `given`, and its other spelling, the sharding strategy of this name."""
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
        say_that_fsdp2_stands_in()
    return bool(asked) or strategy == "optim_grads_params"


def flag_documentation(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of those it derives from, by field name."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # built-in, or installed without its source
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for entry, following in itertools.pairwise(body):
            if not (isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[entry.target.id] = " ".join(str(following.value.value).split())
    return found


def _collector(defaults: dict[str, Any]) -> Any:
    """A function whose keyword parameters are the flags; the parser reads them from its signature."""
    cyclopts = _library()
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
        # Where FSDP2's settings only narrow those of every wrapper, the flag is explained as the wider one.
        hints = get_type_hints(kind)
        texts = flag_documentation(kind) | flag_documentation(common[section])
        entries = {entry.name: entry for entry in (*fields(kind), *fields(common[section]))}
        for name, entry in entries.items():
            if name in _NOT_FLAGS or name in parameters or entry.metadata.get("is_code"):
                continue
            settings: dict[str, Any] = {"help": texts.get(name)}
            if name in _NEGATED:
                # The positive name is kept too, so that a program's own default can be turned over either way.
                settings.update(name=f"--{name.replace('_', '-')}", negative=_NEGATED[name])
            elif name in _OTHER_NAMES:
                settings["name"] = _OTHER_NAMES[name]
            add(
                name,
                section,
                bool if name in _NEGATED else _flag_type(hints[name]),
                inspect.Parameter.empty if _is_required(entry) else entry.default,
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
    """cyclopts itself would round 1.5 to 2."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'"{text}" is not an integer.') from None


def _library() -> Any:
    try:
        import cyclopts
    except ImportError:
        raise MissingExtraError("cyclopts", "train", "Reading command-line flags") from None
    return cyclopts


def _flag_type(hint: Any) -> Any:
    """The type of a field, less what a command line cannot give: a dtype is its name, a function is left out."""
    if torch.dtype in get_args(hint):
        return str | None
    values = [kind for kind in get_args(hint) if get_origin(kind) is not Callable]
    return values[0] if get_args(hint) and get_origin(hint) in (Union, UnionType) and len(values) == 1 else hint


def _is_required(entry: Field[Any]) -> bool:
    if entry.metadata.get("required_flag"):
        return True
    return entry.default is MISSING and entry.default_factory is MISSING


def _field_names(kind: type) -> set[str]:
    return {entry.name for entry in fields(kind)}
