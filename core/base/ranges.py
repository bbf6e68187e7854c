"""Checks numbers and choices of a configuration, with one wording of the error each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .errors import ConfigError, ShardstackError


def out_of_range(
    settings: object,
    *names: str,
    least: float = -math.inf,
    over: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    takes: str = "",
) -> Iterator[str]:
    """Yields a message for each attribute of `settings` that is not in a range. None is in every range, NaN in none.

    Args:
        least, most: inclusive bounds.
        over, below: exclusive bounds.
        takes: the message's description of the range; by default "zero or a positive number" from 0 on, else "a
            positive number".
    """
    takes = takes or ("zero or a positive number" if least == 0 else "a positive number")
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (least <= value <= most and over < value < below):
            yield f"{name} is {value}; it takes {takes}"


def check_range(
    settings: object, *names: str, error: type[ShardstackError] = ConfigError, takes: str = "", **bounds: float
) -> None:
    """Raises `error` for the first attribute of `settings` that is out of range: see :func:`out_of_range`."""
    for problem in out_of_range(settings, *names, takes=takes, **bounds):
        raise error(problem)


def out_of_choices(settings: object, optional: bool = False, /, **choices: Sequence[str]) -> Iterator[str]:
    """Yields a message for each named attribute of `settings` that is none of its choices. `optional` adds None."""
    for name, taken in choices.items():
        value = getattr(settings, name)
        if value not in taken and not (optional and value is None):
            shown = ", ".join(f'"{choice}"' for choice in taken)
            yield f"{name} is {value!r}; it takes {'None or ' * optional}one of {shown}"


def check_choices(
    settings: object,
    optional: bool = False,
    /,
    *,
    error: type[ShardstackError] = ConfigError,
    **choices: Sequence[str],
) -> None:
    """Raises `error` for the first named attribute of `settings` that is none of its choices. `optional` adds None."""
    for problem in out_of_choices(settings, optional, **choices):
        raise error(problem)


def check_positive(sizes: Mapping[str, int], error: type[ShardstackError] = ConfigError, caller: str = "") -> None:
    """Raises `error` for the first of named sizes that is below one. The message begins with `caller`, if given."""
    for name, size in sizes.items():
        if size < 1:
            raise error(f"{f'{caller}: ' if caller else ''}{name} is {size}; it takes a positive number")
