"""Arguments that Megatron-LM has and this project has no use for: refused, or ignored with one warning.

A public function that shares its name with Megatron-LM takes the same arguments in the same order. One that would
change what is computed is refused by its name, unless it has its default. One that changes no number, only how
quickly or where something runs, is ignored, and a warning says so once.
"""

from __future__ import annotations

from typing import Any

from .errors import ConfigError, ParallelConfigError
from .warn import warn_once


def refuse(caller: str, error: type[ConfigError] = ParallelConfigError, /, **arguments: tuple[Any, Any, str]) -> None:
    """Raises for the first argument that is not at the value under which this project computes the same.

    Args:
        caller: the function that was called.
        error: the class to raise.
        arguments: by Megatron-LM's name the value given, the only value taken, and what to do instead.

    Raises:
        ConfigError: of the class `error`.
    """
    for name, (value, taken, remedy) in arguments.items():
        if value is not taken and value != taken:
            raise error(f"{caller}: {name} is {value!r}, and only {taken!r} is supported; {remedy}")


def ignore(caller: str, reason: str, /, **arguments: tuple[Any, Any]) -> None:
    """Warns once, naming them, of arguments that were given and that nothing reads.

    Args:
        caller: the function that was called.
        reason: why ignoring them changes no number.
        arguments: by Megatron-LM's name the value given, and the default.
    """
    given = sorted(name for name, (value, default) in arguments.items() if value is not default and value != default)
    if given:
        warn_once(f"{caller} ignores {', '.join(given)}: {reason}", stacklevel=4)
