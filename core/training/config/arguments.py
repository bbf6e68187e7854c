"""Makes command-line flags from the fields of `PretrainConfig`'s sections.

A field gives its flag the name (``num_layers`` -> ``--num-layers``), type, default and, by the docstring under it, the
help. A field of several sections is one flag that sets them all. The exceptions are in the tables of `config.build`.
cyclopts parses flags and prints help.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from ...base.errors import ConfigError, import_extra, raise_together
from ...base.text import nearest
from ...distributed.fully_sharded_data_parallel_config import FSDP2
from ..launch.entry import environment_rank
from ..launch.processes import say
from . import build
from .files import PARSERS, read_settings
from .megatron import flag_name, refusal, sort_flags, with_megatron_defaults
from .pretrain_config import PretrainConfig, fits_fp32, section_types

Result = TypeVar("Result")
Problems = list[ConfigError] | None
_UNITS = ("iter", "sample", "token", "fraction", "size", "interval")
_OF_LAUNCHER = json.loads((Path(__file__).parents[1] / "launch" / "flags.json").read_text("utf-8"))
_library = functools.partial(import_extra, extra="train", purpose="Reading command-line flags")


def parse_arguments(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, *, description: str = "", name: str = ""
) -> PretrainConfig:
    """Builds a run's settings from command-line flags, as `parse_values` reads them.

    Raises:
        ConfigError: as `parse_values`; or a section refuses its settings.
    """
    problems: list[ConfigError] = []
    values = parse_values(arguments, defaults, problems=problems, description=description, name=name)
    try:
        config = build.build_config(values)
    except ConfigError as error:
        problems.append(error)
    raise_together(problems)
    return config


def parse_values(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, *, problems: Problems = None, **texts: str
) -> dict[str, Any]:
    """Returns the settings that a command line makes, by field name.

    A file that ``--config`` names overrides the program's defaults, a later file an earlier one, and flags all files.
    Where flags choose another wrapper, the file's settings that it does not have are dropped, and a line names them.
    With ``--megatron-defaults``, or a flag that only Megatron-LM has, the defaults are those of Megatron-LM's parser.

    Args:
        arguments: the command line after the program's name.
        defaults: a program's defaults by field name, which replace those of the dataclasses.
        problems: takes the errors of flags that leave the others readable; None raises them.
        texts: `description`, the first paragraph of ``--help``, which only the first rank prints, and which ends the
            program; and the program's `name`.

    Raises:
        ConfigError: flags or keys of a file are unknown, all of them at once, or a value has the wrong type.
        MissingExtraError: cyclopts is not installed, or for a file of YAML pyyaml.
    """

    def first(*, config: tuple[Path, ...] = (), megatron_defaults: bool | None = None) -> tuple[Any, Any]:
        return config, megatron_defaults

    (paths, is_megatrons), _ = parse_known(first, arguments)
    words, ignored, signs = sort_flags(arguments, _run_flags())
    chosen, is_megatrons = is_megatrons, bool(signs) if is_megatrons is None else is_megatrons
    lower = functools.reduce(build.merge, map(read_settings, paths), {} if is_megatrons else dict(defaults or {}))
    # Help alone shows them: where a program has imported pydantic, cyclopts lets it judge defaults too.
    shown = lower if {"-h", "--help"} & {*arguments} else dict.fromkeys(lower)
    values = parse_call(collector(shown), words, problems=problems, **texts)
    merged = build.merge(lower, values)
    lost = build.of_other_wrappers(merged) - values.keys() if paths and build.ALTERNATIVES[0] & values.keys() else {}
    if is_megatrons:
        merged = with_megatron_defaults(merged, values, ignored)
    if environment_rank() == 0:
        if lost:
            say(f"warning: dropped from --config, since the wrapper of the flags has none: {', '.join(sorted(lost))}")
        if ignored:
            say(f"warning: ignored, since they change no number here: {', '.join(dict.fromkeys(ignored))}")
        if is_megatrons and chosen is None:
            reason = f"the command line has {signs[0]}; --no-megatron-defaults takes the program's"
            say(f"defaults are Megatron-LM's, since {reason}")
    return {name: value for name, value in merged.items() if name not in {*lost, "config", "megatron_defaults"}}


def parse_known(function: Callable[..., Result], arguments: Sequence[str]) -> tuple[Result, list[str]]:
    """Calls `function` with its own flags of a command line. Returns its result, and all other words."""
    bound, rest, errors = _bind(_app(function, help_flags=[]), arguments)
    raise_together(errors)
    return function(*bound.args, **bound.kwargs), rest


def parse_call(
    function: Callable[..., Result], arguments: Sequence[str], *, problems: Problems = None, **texts: str | None
) -> Result:
    """Calls `function` with keyword arguments parsed from a command line. Returns its result.

    Args:
        problems: takes the errors that leave the other flags readable; None raises them.
        texts: `description`, the first paragraph of ``--help``, by default the function's docstring; and the
            program's `name`.

    Raises:
        ConfigError: flags are unknown, all of them at once, or a value has the wrong type.
        MissingExtraError: cyclopts is not installed.
    """
    app = _app(function, name=texts.get("name", ""), help=texts.get("description"), help_format="plaintext")
    if {"-h", "--help"} & set(arguments):
        if environment_rank() == 0:
            app.help_print([])
        raise SystemExit(0)
    bound, unused, errors = _bind(app, arguments)
    errors = [*_mistakes(app, arguments, unused), *errors]
    if bound is None and not errors:
        given, flags = {*map(flag_name, arguments)}, app.assemble_argument_collection()
        missing = [flag.name for flag in flags if flag.required and not given & {*map(flag_name, flag.names)}]
        errors = [ConfigError(f"missing: {', '.join(missing)}; see --help")]
    if problems is None or bound is None:
        raise_together(errors)
    else:
        problems += errors
    return function(*bound.args, **bound.kwargs)


def _app(function: Callable[..., Any], **settings: Any) -> Any:
    cyclopts = _library("cyclopts")
    # The last one wins, as in Megatron-LM's parser.
    parameter = cyclopts.Parameter(allow_repeating=True, converter=_value)
    app = cyclopts.App(version_flags=[], default_parameter=parameter, **settings)
    app.default(function)
    return app


def _bind(app: Any, arguments: Sequence[str]) -> tuple[Any, list[str], list[ConfigError]]:
    """Returns the arguments of an app's function, None if one is missing or wrong, words that are none, and errors."""
    cyclopts = _library("cyclopts")
    try:
        _, bound, unused, _ = app.parse_known_args(list(arguments))
    except cyclopts.CycloptsError as error:
        error.verbose = False
        is_missing = isinstance(error, cyclopts.MissingArgumentError) and not error.keyword
        return None, error.unused_tokens or [], [] if is_missing else [ConfigError(" ".join(str(error).split()))]
    return bound, unused, []


@functools.cache
def _run_flags() -> dict[str, bool]:
    return _names(_app(collector({})))


def _names(app: Any) -> dict[str, bool]:
    """Returns the names of all flags as they are shown, and whether each takes a value."""
    flags = app.assemble_argument_collection()
    return {flag_name(name): flag.hint is not bool for flag in flags for name in flag.names}


def _mistakes(app: Any, arguments: Sequence[str], unused: Sequence[str]) -> list[ConfigError]:
    """Says which words of a command line are wrong: every flag that is unknown, or else the values that follow none.

    Flags that are refused for one reason share a line.
    """
    if not unused:
        return []
    known = _names(app)
    reasons: dict[str, list[str]] = {}
    for word, following in pairwise([*unused, "--"]):
        if (name := flag_name(word)).startswith("--") and name not in known:
            takes_value = "=" in word or not following.startswith("--")
            same_kind = [other for other in known if known[other] == takes_value and _unit(other) == _unit(name)]
            same_kind += [f"--{other.replace('_', '-')} of the launcher" for other in _OF_LAUNCHER]
            reason = refusal(name) or f"{nearest(name, same_kind, cutoff=0.8)}"
            reasons.setdefault(reason, []).append(name if refusal(name) else f"Unknown option: {name}")
    lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    if not lines and not unused[0].startswith("--"):
        if "--config" in known and Path(unused[0]).suffix.lower() in PARSERS:
            lines = [f"{unused[0]!r} is no flag; did you mean --config {unused[0]}?"]
        else:
            lines = [f"unexpected value {' '.join(map(repr, unused))}; every value follows its flag, see --help"]
    return [ConfigError(line) for line in lines]


def _unit(flag: str) -> str:
    """Returns the unit that a flag's name ends with, if it has one: of another unit its value means another thing."""
    return next((unit for unit in _UNITS if flag.removesuffix("s").endswith(unit)), "")


@functools.cache
def flag_documentation(kind: type) -> Mapping[str, str]:
    """Returns the docstring under each field of a dataclass and its bases, by field name.

    Raises:
        MissingExtraError: docstring_parser, which cyclopts brings, is not installed.
    """
    parse = _library("docstring_parser").parse_from_object
    params = [text for base in reversed(kind.__mro__[:-1]) for text in parse(base).params]
    return {text.arg_name: " ".join(text.description.split()) for text in params}


def collector(defaults: dict[str, Any]) -> Any:
    """Returns a function whose keyword parameters are the flags, for cyclopts to read from its signature."""
    cyclopts = _library("cyclopts")
    groups = {name: cyclopts.Group.create_ordered(title) for name, title in build.TITLES.items()}
    parameters: dict[str, inspect.Parameter] = {}

    def add(flag: str, section: str, kind: Any, default: Any, **settings: Any) -> None:
        if tuple in (get_origin(kind), *map(get_origin, get_args(kind))):
            settings.setdefault("consume_multiple", True)
        if default is None or type(None) in get_args(kind):
            settings["converter"] = _value_or_none
        parameter = cyclopts.Parameter(group=groups[section], **settings)
        shown = defaults.get(flag, default)
        annotation: Any = Annotated[kind if shown is not None else kind | None, parameter]
        parameters[flag] = inspect.Parameter(
            flag, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation
        )

    for name, (section, kind, text) in build.SHORTHANDS.items():
        add(name, section, kind, False if kind is bool else None, help=text, consume_multiple=False)
    common = section_types("no_shard")
    for section, kind in section_types(FSDP2).items():
        # FSDP2 narrows some settings of every wrapper: the flag's help is that of the wider one.
        hints = get_type_hints(kind)
        texts = {**flag_documentation(kind), **flag_documentation(common[section])}
        entries = {entry.name: entry for entry in (*fields(kind), *fields(common[section]))}
        for name, entry in entries.items():
            if name in build.NOT_FLAGS or name in parameters or entry.metadata.get("is_code"):
                continue
            settings: dict[str, Any] = {"help": texts.get(name)}
            if name in build.NEGATED:
                # Keep the positive name too, so that either value can override a program's default.
                settings.update(name=f"--{name.replace('_', '-')}", negative=build.NEGATED[name])
            elif name in build.OTHER_NAMES:
                settings["name"] = build.OTHER_NAMES[name]
            add(
                name,
                section,
                bool if name in build.NEGATED else _flag_type(hints[name]),
                inspect.Parameter.empty if build.is_required(entry) else entry.default,
                **settings,
            )

    def collect(**flags: Any) -> dict[str, Any]:
        return flags

    collect.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    collect.__annotations__ = {}
    return collect


def _value_or_none(kind: Any, tokens: Sequence[Any]) -> Any:
    is_none = kind not in (str, Path) and tokens[0].value.lower() in ("none", "null")
    return None if is_none else _value(kind, tokens)


def _value(kind: Any, tokens: Sequence[Any]) -> Any:
    """Converts a flag's words strictly.

    Cyclopts itself would round 1.5 to the integer 2, take an empty path for the current folder, and a number that fp32
    cannot hold for 0 or infinity.
    """
    text = tokens[0].value
    if kind is int and not re.fullmatch(r"[+-]?[0-9_]+", text):
        raise ValueError(f'"{text}" is not an integer.')
    if kind is Path and not text:
        raise ValueError("the path is empty; give one, or leave the flag out.")
    value = _library("cyclopts").convert(kind, tokens)
    if kind is float and re.search("[1-9]", text.lower().partition("e")[0]) and not fits_fp32(value or math.ulp(0)):
        raise ValueError(f'"{text}" is 0 or infinity in fp32, which holds 1e-45 to 3e38.')
    return value


def _flag_type(hint: Any) -> Any:
    """Returns the type of a field's flag: a dtype is given by name, and a function is left out."""
    if torch.dtype in get_args(hint):
        return str | None
    values = [kind for kind in get_args(hint) if get_origin(kind) is not Callable]
    return values[0] if get_args(hint) and get_origin(hint) in (Union, UnionType) and len(values) == 1 else hint
