"""Formats the facts as a table for a terminal."""

from __future__ import annotations

from .facts import ModelFacts
from .rows import TEXT_COLUMNS, headline, notes, shorten, table

WIDTH = 119
"""Most characters of a line."""

_NARROWEST = {"holds": 7, "unit": 12}
"""Least widths of the text columns, in the order in which they are narrowed."""


def as_text(facts: ModelFacts) -> str:
    """Returns the headline, the table, and notes below it."""
    said = table(facts)
    lines = [said.columns, *said.body, said.foot]
    widths = _fit({column: max(len(line[i]) for line in lines) for i, column in enumerate(said.columns)})
    rows = ["  ".join(map(_pad, line, widths, widths.values())).rstrip() for line in lines]
    rule = "-" * max(map(len, rows))
    return "\n".join(
        [headline(facts), "", rows[0], rule, *rows[1:-1], rule, rows[-1], "", *map(_shorten_note, notes(facts))]
    )


def _fit(widths: dict[str, int]) -> dict[str, int]:
    """Narrows the column of contents, then that of names, until a line fits."""
    fitted = dict(widths)
    excess = sum(fitted.values()) + 2 * (len(fitted) - 1) - WIDTH
    for column, narrowest in _NARROWEST.items():
        if excess > 0:
            cut = min(excess, max(fitted[column] - narrowest, 0))
            fitted[column] -= cut
            excess -= cut
    return fitted


def _pad(cell: str, column: str, width: int) -> str:
    return shorten(cell, width).ljust(width) if column in TEXT_COLUMNS else cell.rjust(width)


def _shorten_note(note: str) -> str:
    return note if len(note) <= WIDTH else f"{note[: WIDTH - 1]}…"
