"""Decides which units free their gathered parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ...errors import ParallelConfigError
from ..fully_sharded_data_parallel_config import Reshard


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
