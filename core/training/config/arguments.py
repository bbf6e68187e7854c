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
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from ...base.errors import ConfigError, import_extra
from ...base.megatron_names import FOREIGN_FLAGS
from ...base.text import nearest
from ...distributed.fully_sharded_data_parallel_config import FSDP2
from ..launch.entry import environment_rank
from ..launch.processes import say
from . import build
from .files import PARSERS, read_settings
from .pretrain_config import PretrainConfig, fits_fp32, section_types

Result = TypeVar("Result")
_OF_LAUNCHER = json.loads((Path(__file__).parents[1] / "launch" / "flags.json").read_text("utf-8"))
_library = functools.partial(import_extra, extra="train", purpose="Reading command-line flags")


def parse_arguments(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, *, description: str = "", name: str = ""
) -> PretrainConfig:
    """Builds a run's settings from command-line flags, as `parse_values` reads them.

    Raises:
        ConfigError: as `parse_values`; or a section refuses its settings.
    """
    return build.build_config(parse_values(arguments, defaults, description=description, name=name))


def parse_values(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, *, description: str = "", name: str = ""
) -> dict[str, Any]:
    """Returns the settings that a command line makes, by field name.

    A file that ``--config`` names overrides the program's defaults, a later file an earlier one, and flags all files.
    Where flags choose another wrapper, the file's settings that it does not have are dropped, and a line names them.

    Args:
        arguments: the command line after the program's name.
        defaults: a program's defaults by field name, which replace those of the dataclasses.
        description: first paragraph of ``--help``, which only the first rank prints, and which ends the program.

    Raises:
        ConfigError: a flag or a key of a file is unknown, or a value has the wrong type.
        MissingExtraError: cyclopts is not installed, or for a file of YAML pyyaml.
    """

    def files(*, config: tuple[Path, ...] = ()) -> tuple[Path, ...]:
        return config

    paths, _ = parse_known(files, arguments)
    lower = functools.reduce(build.merge, map(read_settings, paths), dict(defaults or {}))
    # Help alone shows them: where a program has imported pydantic, cyclopts lets it judge defaults too.
    defaults = lower if {"-h", "--help"} & {*arguments} else dict.fromkeys(lower)
    values = parse_call(collector(defaults), arguments, description=description, name=name)
    merged = build.merge(lower, values)
    lost = build.of_other_wrappers(merged) - values.keys() if paths and build.ALTERNATIVES[0] & values.keys() else {}
    if lost and environment_rank() == 0:
        say(f"warning: dropped from --config, since the wrapper of the flags has none: {', '.join(sorted(lost))}")
    return {name: value for name, value in merged.items() if name not in {*lost, "config"}}


def parse_known(function: Callable[..., Result], arguments: Sequence[str]) -> tuple[Result, list[str]]:
    """Calls `function` with its own flags of a command line. Returns its result, and all other words."""
    bound, rest = _bind(_app(function, help_flags=[]), arguments)
    return function(*bound.args, **bound.kwargs), rest


def parse_call(
    function: Callable[..., Result], arguments: Sequence[str], *, description: str | None = None, name: str = ""
) -> Result:
    """Calls `function` with keyword arguments parsed from a command line. Returns its result.

    Args:
        description: first paragraph of ``--help``; None takes the function's docstring.

    Raises:
        ConfigError: a flag is unknown, or a value has the wrong type.
        MissingExtraError: cyclopts is not installed.
    """
    app = _app(function, name=name, help=description, help_format="plaintext")
    if {"-h", "--help"} & set(arguments):
        if environment_rank() == 0:
            app.help_print([])
        raise SystemExit(0)
    bound, unused = _bind(app, arguments)
    if unused or bound is None:
        raise ConfigError(_mistake(app.assemble_argument_collection(), arguments, unused))
    return function(*bound.args, **bound.kwargs)


def _app(function: Callable[..., Any], **settings: Any) -> Any:
    cyclopts = _library("cyclopts")
    # The last one wins, as in Megatron-LM's parser.
    parameter = cyclopts.Parameter(allow_repeating=True, converter=_value)
    app = cyclopts.App(version_flags=[], default_parameter=parameter, **settings)
    app.default(function)
    return app


def _bind(app: Any, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the arguments of an app's function, None if a required one is missing, and words that are none."""
    cyclopts = _library("cyclopts")
    try:
        _, bound, unused, _ = app.parse_known_args(list(arguments))
    except cyclopts.CycloptsError as error:
        error.verbose, bound, unused = False, None, error.unused_tokens
        if not isinstance(error, cyclopts.MissingArgumentError) or error.keyword:
            raise ConfigError(" ".join(str(error).split())) from None
    return bound, unused


def _mistake(flags: Any, arguments: Sequence[str], unused: Sequence[str]) -> str:
    """Says which words of a command line are wrong, or else what is missing, which a wrong one may mean."""
    known = [name for flag in flags for name in flag.names]
    if unknown := next((word.partition("=")[0].replace("_", "-") for word in unused if word.startswith("--")), ""):
        known += [f"--{name.replace('_', '-')} of the launcher" for name in _OF_LAUNCHER]
        return f"Unknown option: {unknown}: {FOREIGN_FLAGS.get(unknown[2:]) or nearest(unknown, known)}"
    if unused and "--config" in known and Path(unused[0]).suffix.lower() in PARSERS:
        return f"{unused[0]!r} is no flag; did you mean --config {unused[0]}?"
    if unused:
        return f"unexpected value {' '.join(map(repr, unused))}; every value follows its flag, see --help"
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return f"missing: {', '.join(f.name for f in flags if f.required and not given & {*f.names})}; see --help"


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
