"""Formats bytes, ranks and lists for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUM_LISTED = 8
_NUM_CHOICES = 20


def readable_bytes(num_bytes: float) -> str:
    """Formats ``1536`` as ``1.5 KiB``: at most three digits, in the largest unit with a digit before the point."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} {_UNITS[-1]}"


def rank_list(ranks: Sequence[int]) -> str:
    """Formats ranks as ``rank 3`` or ``ranks 0, 1, 3``; of many, the first few and the number of the rest."""
    shown = ", ".join(map(str, ranks[:_NUM_LISTED]))
    more = f" and {len(ranks) - _NUM_LISTED} more" if len(ranks) > _NUM_LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def listed(parts: Sequence[str]) -> str:
    """Joins parts of a sentence with semicolons."""
    return "; ".join(parts)


def choices(value: str, known: Iterable[str]) -> str:
    """Says which values are allowed instead of `value`: ``it takes one of a, b``; suggests a similar one first."""
    names = list(dict.fromkeys(known))
    near = get_close_matches(value.lower(), {name.lower(): None for name in names}, n=1)
    nearest = next((f"did you mean {name!r}? " for name in names if near and name.lower() == near[0]), "")
    shown = ", ".join(names[:_NUM_CHOICES])
    more = f" and {len(names) - _NUM_CHOICES} more" if len(names) > _NUM_CHOICES else ""
    return f"{nearest}it takes one of {shown}{more}" if names else "there is none to choose from"
