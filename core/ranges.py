"""Numbers of a configuration that are out of their range: one check, and one wording."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    """Yields a message for each attribute of `settings` that is not in a range; None is in every range, NaN in none.

    Args:
        least, most: bounds that belong to the range.
        over, below: bounds that do not.
        takes: what the message says is taken; by default "zero or a positive number" from 0 on, else "a positive
            number".
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
