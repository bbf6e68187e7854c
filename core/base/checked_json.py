"""Reads JSON from elsewhere as exactly what a type says: the declaration of a dataclass is its check, too.

A type is str, int, float, bool or Any; a list, tuple or table of text keys; a dataclass, or a union of which ``kind``
tells the dataclasses apart: the name of the class, or what it has as `kind`. ``Annotated`` adds where the value has to
be, a range, a set or a table, or a function that has to hold for it, and how a message says so. Nothing else gets
through: no other field, no number that is not finite, no text that is long or steers a terminal.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from .files import BoundsError, brief, parse_json

_MOST_CHARACTERS = 4096


def as_json(message: Any) -> dict[str, Any]:
    """Returns a dataclass from JSON, with the dataclasses inside, as `checked` reads it."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    inner = {name: as_json(value) if is_dataclass(value) else value for name, value in values.items()}
    return {"kind": _kind_of(type(message)), **inner}


def decode(message: bytes, expected: Any) -> Any:
    """Returns what a message has, as its type says.

    Args:
        expected: the types that may come, as a union.

    Raises:
        BoundsError: it is none of them. The text follows the name of what came: "line 3".
    """
    try:
        value = parse_json(message.decode())
    except ValueError as error:  # BoundsError, and bytes that are no text
        raise BoundsError(f"is no message: {brief(str(error))}") from None
    return checked(value, expected)


def checked(value: Any, expected: Any, name: str = "it") -> Any:
    """Returns a value of JSON as its type has it.

    Args:
        name: of the field.

    Raises:
        BoundsError: it is not of that type. The text follows the name of what the value is in.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any:
        return value
    if origin is UnionType:
        return checked(value, _member(value, arguments), name)
    if is_dataclass(expected) and isinstance(value, dict):
        return _read_fields(value, expected)
    if origin is Annotated:
        value, rule = checked(value, arguments[0], name), arguments[1]
        if rule(value) if callable(rule) else value in rule:
            return value
    elif origin is dict and type(value) is dict:
        return {checked(key, str, name): checked(inner, arguments[1], name) for key, inner in value.items()}
    elif origin is list and type(value) is list:
        return [checked(inner, arguments[0], name) for inner in value]
    elif origin is tuple and type(value) is list and len(value) == len(arguments):
        return tuple(checked(inner, argument, name) for inner, argument in zip(value, arguments, strict=True))
    elif expected is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif expected is str and type(value) is str and len(value) <= _MOST_CHARACTERS and value.isprintable():
        return value  # printable: no text from elsewhere moves the cursor of a terminal, or breaks a line
    elif expected in (int, bool) and type(value) is expected:
        return value
    raise BoundsError(f"has {brief(value)} for {name}, which takes {_shown(expected)}")


def _member(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Returns which of the types of a union a value has to be."""
    for kind in kinds:
        tag = _kind_of(kind) if is_dataclass(kind) else None
        if type(value) is (get_origin(kind) or kind) or (tag and isinstance(value, dict) and value.get("kind") == tag):
            return kind
    raise BoundsError(f"is none of {', '.join(map(_shown, kinds))}: {brief(value)}")


def _kind_of(expected: Any) -> str:
    return str(getattr(expected, "kind", expected.__name__))


def _read_fields(value: dict[str, Any], expected: Any) -> Any:
    hints, kind = _hints(expected), expected.__name__
    if value.keys() - {"kind"} != hints.keys() or value.get("kind", _kind_of(expected)) != _kind_of(expected):
        raise BoundsError(f"has other fields than a {kind} ({', '.join(hints)}): {brief(value)}")
    return expected(**{name: checked(value[name], hint, f"{kind}.{name}") for name, hint in hints.items()})


_hints = cache(lambda kind: get_type_hints(kind, include_extras=True))


def _shown(expected: Any) -> str:
    """Says what a type takes: ``int in range(0, 256)``."""
    if get_origin(expected) is not Annotated:
        return str(getattr(expected, "__name__", expected))
    inner, rule, *said = get_args(expected)
    return " ".join([_shown(inner), *said]) if said or callable(rule) else f"{_shown(inner)} in {brief(rule)}"
