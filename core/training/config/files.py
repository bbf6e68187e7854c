"""Reads the settings of a run from a file: YAML, TOML, or the ``config.json`` that a run writes."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from ...base.errors import ConfigError, import_extra, raise_together
from ...base.files import CONFIG_BYTES, brief, parse_json, read_file
from ...base.text import nearest
from ...distributed.fully_sharded_data_parallel_config import FSDP2
from . import build
from .megatron import refusal
from .pretrain_config import from_json_value, section_types


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the settings of a file by field name.

    A key is a section of `PretrainConfig`, whose value has settings by name, or the name of a setting: that of its
    field or flag, with dashes or underscores.

    Raises:
        ConfigError: the file cannot be read; or a line for each key that is unknown, in the wrong section, or has a
            value of the wrong type.
        MissingExtraError: pyyaml is not installed.
    """
    if (parse := PARSERS.get(path.suffix.lower())) is None:
        raise ConfigError(f"--config {path}: the name ends in none of {', '.join(PARSERS)}; rename it")
    try:
        content = parse(read_file(path, CONFIG_BYTES).decode("utf-8-sig"))
        if not isinstance(content, dict | None):
            raise ValueError(f"it holds {brief(content)}; write names with values")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    found: dict[str, list[tuple[str, Any, Any]]] = {}
    problems: list[str] = []
    for key, value in (content or {}).items():
        section = key if key in build.TITLES and (value is None or isinstance(value, Mapping)) else ""
        for inner, entry in (value or {}).items() if section else [(key, value)]:
            place = f"{section}.{inner}" if section else str(inner)
            try:
                name, *setting = _setting(section, str(inner).replace("-", "_"), entry)
                found.setdefault(name, []).append((place, *setting))
            except ValueError as error:
                problems.append(f"{place} {error}")
    settings: dict[str, Any] = {}
    for name, entries in found.items():
        if any(value != entries[0][1] for _, value, _ in entries):
            # A run's file has the settings of two sections in both, each with its own default.
            entries = [entry for entry in entries if entry[1] != entry[2]]
        for place, value, _ in entries:
            if settings.setdefault(name, value) != value:
                problems.append(f"{place} is {value!r}, and {entries[0][0]} is {settings[name]!r}; drop one")
    raise_together([ConfigError(f"--config {path}: {problem}") for problem in problems])
    return {name: value for name, value in settings.items() if name not in build.NOT_FLAGS}


def _setting(section: str, key: str, value: Any) -> tuple[str, Any, Any]:
    """Returns field, value and a section's default of a key, or raises ValueError with what is wrong with it."""
    name = _FIELDS.get(key, key)
    if name != key and isinstance(value, bool) and name in build.NEGATED:
        value = not value
    homes = _settings().get(name)
    if homes is None:
        if key in build.TITLES:
            raise ValueError("is a section; write it once, at the top, with settings by name below it")
        near = nearest(key, [*_settings(), *_FIELDS, *build.TITLES], "drop it")
        raise ValueError(f"is unknown; {refusal(key.replace('_', '-')) or near}")
    if section and section not in homes:
        raise ValueError(f"is in the wrong section; it belongs to {' and '.join(homes)}")
    hint, default = homes[section] if section else next(iter(homes.values()))
    try:
        setting = from_json_value(hint, value)
        if name in build.NOT_FLAGS and setting != default:
            raise ValueError("only programs set it: drop it")
        return name, setting, default if section else MISSING
    except ValueError as error:
        raise ValueError(f"is {brief(value)}; {error}") from None


@functools.cache
def _settings() -> dict[str, dict[str, tuple[Any, Any]]]:
    """Returns type and default of each setting, by name and section."""
    homes: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, (section, kind, _) in build.SHORTHANDS.items():
        homes[name] = {section: (kind, None)}
    for name in ("config", "megatron_defaults"):
        del homes[name]  # files name no files, and are final
    for section, config in section_types(FSDP2).items():
        hints = get_type_hints(config)
        for entry in fields(config):
            if not entry.metadata.get("is_code"):
                homes.setdefault(entry.name, {})[section] = hints[entry.name], entry.default
    return homes


_FIELDS = {
    flag.lstrip("-").replace("-", "_"): name
    for name, flags in (build.OTHER_NAMES | {name: (flag,) for name, flag in build.NEGATED.items()}).items()
    for flag in flags
}
"""Fields by the name of a flag that has another one, or that turns it off."""


def _parse_yaml(text: str) -> Any:
    yaml = import_extra("yaml", "train", "A settings file of YAML")

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else error
        raise ValueError(place) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is there twice")
    return dict(pairs)


PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": functools.partial(parse_json, object_pairs_hook=_once),
}
"""What reads a file, by the end of its name."""
