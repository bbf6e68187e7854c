"""Refuses, or ignores with one warning, arguments of Megatron-LM that this project does not support.

A public function that shares its name with Megatron-LM takes the same arguments in the same order. An argument that
would change what is computed is refused by its name, unless it has its default. An argument that changes no number,
only how fast or where something runs, is ignored with one warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .errors import ConfigError, ParallelConfigError, warn_once


def refuse(caller: str, error: type[ConfigError] = ParallelConfigError, /, **arguments: tuple[Any, Any, str]) -> None:
    """Raises for the first argument that does not have its only supported value.

    Args:
        caller: the function that was called.
        error: the class to raise.
        arguments: by Megatron-LM's name: the given value, the only supported value, and what to do instead.

    Raises:
        ConfigError: of the class `error`.
    """
    for name, (value, taken, remedy) in arguments.items():
        if value is not taken and value != taken:
            raise error(f"{caller}: {name} is {value!r}, and only {taken!r} is supported; {remedy}")


def ignore(caller: str, reason: str, /, **arguments: tuple[Any, Any]) -> None:
    """Warns once about arguments that were given and are not used. Names them.

    Args:
        caller: the function that was called.
        reason: why ignoring them changes no number.
        arguments: by Megatron-LM's name: the given value, and the default.
    """
    given = sorted(name for name, (value, default) in arguments.items() if value is not default and value != default)
    if given:
        warn_once(f"{caller} ignores {', '.join(given)}: {reason}", stacklevel=4)


Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class ForeignFields:
    """Fields of a config class of Megatron-LM that our class of this name does not have."""

    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """By name: the only supported value, which is Megatron-LM's default, and what to do instead."""

    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by name. Another value is stored as an attribute with a warning, and changes no number."""

    accepted: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by name of fields that need no warning: they are always in effect, or a training loop stores them
    here."""

    inert_prefixes: tuple[str, ...] = ()
    """Prefixes of fields that only configure features of refused fields."""

    positional: tuple[str, ...] = ()
    """Our fields that may be given by position, the first ones in Megatron-LM's order."""

    def __or__(self, other: ForeignFields) -> ForeignFields:
        return ForeignFields(
            refused={**self.refused, **other.refused},
            ignored={**self.ignored, **other.ignored},
            accepted={**self.accepted, **other.accepted},
            inert_prefixes=(*self.inert_prefixes, *other.inert_prefixes),
            positional=other.positional or self.positional,
        )


def takes_foreign_fields(foreign: ForeignFields) -> Callable[[type[Config]], type[Config]]:
    """Lets the constructor of a dataclass accept Megatron-LM's fields, in addition to those of its bases.

    Fields that are not given read as their defaults, such as ``config.fp8``.

    Raises:
        ConfigError: by the constructor, for a refused field, or too many fields by position, whose order changes
            between Megatron-LM's versions.
    """

    def decorate(kind: type[Config]) -> type[Config]:
        every = getattr(kind, "foreign_fields", ForeignFields()) | foreign
        own = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
        refused = {name: entry for name, entry in every.refused.items() if name not in own}
        ignored = {name: default for name, default in every.ignored.items() if name not in own}
        accepted = {name: default for name, default in every.accepted.items() if name not in own}
        construct = kind.__init__

        @functools.wraps(construct)
        def __init__(self: Config, *args: Any, **given: Any) -> None:
            if len(args) > len(every.positional):
                raise ConfigError(
                    f"{kind.__name__} takes {len(every.positional)} field(s) by position, and {len(args)} were given; "
                    "give fields by name, as their order changes between Megatron-LM's versions"
                )
            given = dict(zip(every.positional, args, strict=False)) | given
            absent = {name for name in given if name.startswith(every.inert_prefixes) and name not in own}
            absent |= given.keys() & (refused.keys() | ignored.keys() | accepted.keys())
            foreign = {name: given.pop(name) for name in absent}
            refuse(
                kind.__name__,
                ConfigError,
                **{name: (value, *refused[name]) for name, value in foreign.items() if name in refused},
            )
            ignore(
                kind.__name__,
                "nothing here reads them, and no number changes",
                **{
                    name: (value, ignored.get(name))
                    for name, value in foreign.items()
                    if name not in refused and name not in accepted
                },
            )
            construct(self, **given)
            vars(self).update(foreign)

        for name, default in (ignored | accepted | {name: entry[0] for name, entry in refused.items()}).items():
            if not hasattr(kind, name):
                setattr(kind, name, default)
        kind.__init__ = __init__  # type: ignore[assignment]
        kind.foreign_fields = every  # type: ignore[attr-defined]
        return kind

    return decorate
