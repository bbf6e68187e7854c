"""Formats the facts as a table for a terminal."""

from __future__ import annotations

from .facts import ModelFacts
from .rows import COLUMNS, cells, fold, headline, notes, shorten, totals

WIDTH = 119
"""Most characters of a line."""

_NUM_TEXT_COLUMNS = 2
_NARROWEST = {1: 7, 0: 12}
"""Least widths of the text columns, by index, in the order in which they are narrowed."""


def as_text(facts: ModelFacts) -> str:
    """Returns the headline, the table, and notes below it."""
    lines = [COLUMNS, *(cells(run) for run in fold(facts.units)), totals(facts)]
    used = [
        index for index in range(len(COLUMNS)) if index == 0 or any(line[index] not in ("", "-") for line in lines[1:])
    ]
    lines = [tuple(line[index] for index in used) for line in lines]
    widths = _fit([max(len(line[column]) for line in lines) for column in range(len(used))], used)
    rows = ["  ".join(_pad(cell, widths[i], used[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
    rule = "-" * max(map(len, rows))
    return "\n".join(
        [headline(facts), "", rows[0], rule, *rows[1:-1], rule, rows[-1], "", *map(_shorten_note, notes(facts))]
    )


def _fit(widths: list[int], used: list[int]) -> list[int]:
    """Narrows the column of contents, then that of names, until a line fits."""
    fitted = list(widths)
    excess = sum(fitted) + 2 * (len(fitted) - 1) - WIDTH
    for column, narrowest in _NARROWEST.items():
        if column in used and excess > 0:
            cut = min(excess, max(fitted[used.index(column)] - narrowest, 0))
            fitted[used.index(column)] -= cut
            excess -= cut
    return fitted


def _pad(cell: str, width: int, column: int) -> str:
    return shorten(cell, width).ljust(width) if column < _NUM_TEXT_COLUMNS else cell.rjust(width)


def _shorten_note(note: str) -> str:
    return note if len(note) <= WIDTH else f"{note[: WIDTH - 1]}…"
