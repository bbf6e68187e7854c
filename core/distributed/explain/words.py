"""How messages put bytes, ranks and enumerations."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUM_LISTED = 8


def readable_bytes(num_bytes: float) -> str:
    """``1536`` is ``1.5 KiB``: three digits at most, in the largest unit that leaves one before the point."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} {_UNITS[-1]}"


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, 3``; of many the first few and how many more."""
    shown = ", ".join(map(str, ranks[:_NUM_LISTED]))
    more = f" and {len(ranks) - _NUM_LISTED} more" if len(ranks) > _NUM_LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence, with semicolons between them."""
    return "; ".join(parts)
