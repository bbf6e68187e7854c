"""Decides which units free their gathered parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..errors import ParallelConfigError

Reshard = bool | int
"""False: parameters stay gathered. True: only this rank's shard is kept. A number: a shard over that many ranks."""


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Reshard]]:
    """Parses ``"PATTERN=VALUE"`` into pairs of a shell pattern for module names and a value.

    Raises:
        ParallelConfigError: an entry is not of this form.
    """
    return [_parse_override(entry) for entry in overrides]


def _parse_override(entry: str) -> tuple[str, Reshard]:
    pattern, separator, value = entry.rpartition("=")
    if separator and value.lower() in ("true", "false"):
        return pattern, value.lower() == "true"
    if separator and value.isdecimal():
        return pattern, int(value)
    raise ParallelConfigError(
        f"reshard_overrides holds {entry!r}; an entry is a pattern of module names, '=', and True, False or a number, "
        "as decoder.layers.0=False"
    )


def reshard_of(name: str, default: Reshard, overrides: Sequence[tuple[str, Reshard]]) -> Reshard:
    """Returns the value for the module `name`: that of the last matching pattern, else `default`."""
    return next((value for pattern, value in reversed(overrides) if fnmatchcase(name, pattern)), default)


def check_reshard(value: Reshard, shard_size: int) -> Reshard:
    """Returns `value` normalised for FSDP2 on `shard_size` ranks: 1 is False and `shard_size` is True.

    Raises:
        ParallelConfigError: a number does not divide `shard_size`; the message lists those that do.
    """
    if isinstance(value, bool):
        return value
    divisors = [number for number in range(1, shard_size + 1) if shard_size % number == 0]
    if value not in divisors:
        raise ParallelConfigError(
            f"reshard_after_forward is {value}, which does not divide the {shard_size} ranks that share a parameter; "
            f"it takes True, False, or one of {', '.join(map(str, divisors))}"
        )
    return value == shard_size if value in (1, shard_size) else value
