"""Formats bytes, ranks and lists for messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TypeVar

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUM_LISTED = 8
_NUM_CHOICES = 20

T = TypeVar("T")


def readable_bytes(num_bytes: float) -> str:
    """Formats ``1536`` as ``1.5 KiB``: three digits at most, in the first unit that has no more of them."""
    unit = 0
    while abs(num_bytes) >= 1000 and unit + 1 < len(_UNITS):
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.{3 if abs(num_bytes) >= 1 else 2}g} {_UNITS[unit]}"


def bytes_cell(num_bytes: int) -> str:
    """Formats bytes for a table, where none are a dash."""
    return readable_bytes(num_bytes) if num_bytes else "-"


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Formats rows of a table as lines: the first `num_left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def padded(row: Sequence[str]) -> Iterator[str]:
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            yield cell.ljust(width) if index < num_left else cell.rjust(width)

    return ["  ".join(padded(row)).rstrip() for row in rows]


def rank_list(ranks: Sequence[int]) -> str:
    """Formats ranks as ``rank 3`` or ``ranks 0, 1, 3``, or of many the first few and the number of the rest."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_parts([*map(str, ranks)], _NUM_LISTED, ', ')}"


def texts_by_rank(texts: Iterable[tuple[int, str]], separator: str = ": ") -> list[str]:
    """Formats what each rank says, equal texts once: ``rank 0: a``, ``ranks 1, 3: b``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return [f"{rank_list(ranks)}{separator}{text}" for text, ranks in ranks_of.items()]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest_multiples(size: int, divisor: int) -> str:
    """Says which sizes near `size` are multiples of `divisor`: ``96 or 128``."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def join_parts(parts: Sequence[str], most: int | None = None, separator: str = "; ") -> str:
    """Joins parts of a sentence. Of many, the first `most` and the number of the rest."""
    text = separator.join(parts[:most])
    more = len(parts) - len(parts[:most])
    return text + (f"{separator.rstrip(', ')} and {more} more" if more else "")


def choices(value: str, allowed: Iterable[str], optional: bool = False) -> str:
    """Says which values are allowed instead of `value`: ``it takes one of a, b``. Suggests a similar one first.

    `optional` adds None.
    """
    names = list(dict.fromkeys(allowed))
    near = get_close_matches(value.lower(), {name.lower(): None for name in names}, n=1)
    nearest = next((f"did you mean {name!r}? " for name in names if near and name.lower() == near[0]), "")
    if not names:
        return "there is none to choose from"
    return f"{nearest}it takes {'None or ' * optional}one of {join_parts(names, _NUM_CHOICES, ', ')}"


def nearest(word: str, names: Collection[str], otherwise: str = "see --help", cutoff: float = 0.6) -> str:
    """Suggests the name that an unknown word is nearest to, whole or cut off: ``did you mean --nproc-per-node?``

    Args:
        cutoff: how similar they have to be, from 0 to 1.
    """
    known = {name[: len(word)]: name for name in names} | {name: name for name in names}
    return next((f"did you mean {known[near]}?" for near in get_close_matches(word, known, 1, cutoff)), otherwise)


def fold_numbered(items: Iterable[T], name: Callable[[T], str], equal: Callable[[T, T], bool]) -> list[list[T]]:
    """Groups items, in order: equal ones whose dotted names count up in one part, such as layers, form a run."""
    runs: list[list[T]] = []
    for item in items:
        names = [name(other) for other in (runs[-1][-2:] if runs else [])] + [name(item)]
        places = {_counted_part(a, b) for a, b in pairwise(names)}
        if runs and len(places) == 1 and None not in places and equal(runs[-1][-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _counted_part(name: str, following: str) -> int | None:
    """Returns which part of the names is a number that goes up by one, or None if the names differ in another way."""
    a, b = name.split("."), following.split(".")
    differing = [index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(differing) != 1:
        return None
    index = differing[0]
    is_next = a[index].isdecimal() and b[index].isdecimal() and int(b[index]) == int(a[index]) + 1
    return index if is_next else None


def numbered_name(first: str, last: str) -> str:
    """Formats a run of `fold_numbered` by its names: ``decoder.layers.0-31``."""
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first.split("."), last.split("."), strict=True))
