"""The facts as one self-contained page: the table, in which bars show bytes, and notes. Light and dark."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from string import Template

from .table import TEXT_COLUMNS, Line, Memory, ModelFacts, UnitFacts, amount, dtype_names, headline, notes, table

# The page around every body, with the style of all pages, and the body of a wrapper's report.
_PAGE, _TABLE = (Template(Path(__file__).with_name(f"{name}.html").read_text("utf-8")) for name in ("page", "table"))


def as_html(facts: ModelFacts) -> str:
    """Returns a page with the table, a bar for what a unit keeps and one for what it gathers, and the notes.

    Escapes every name.
    """
    title, grid = escape(headline(facts)), table(facts)
    head = "".join(f"<th{_style(column)}>{escape(column)}</th>" for column in grid.columns)
    memories = [memory for unit in facts.units for memory in _memory_of(unit).values()]
    most = max((memory.nbytes for memory in memories), default=1)
    rows = "\n".join(f"<tr>{_row(grid.columns, line, _bars(line.unit, most))}</tr>" for line in grid.lines[:-1])
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes(facts))
    total = f"<tr>{_row(grid.columns, grid.lines[-1])}</tr>"
    colours = dict.fromkeys((_colour(memory), dtype_names(memory.dtypes)) for memory in memories)
    legend = "".join(f'<i class="{colour}"></i>{escape(names)}' for colour, names in colours)
    body = _TABLE.substitute(head=head, rows=rows, total=total, legend=legend, items=items)
    return page(title, body.rstrip())


def page(title: str, body: str, style: str = "") -> str:
    """Returns a page of HTML, whose title is also its heading.

    Args:
        style: CSS in addition to that of all pages.
    """
    return _PAGE.substitute(title=title, style=style, body=body)


def _row(columns: tuple[str, ...], line: Line, bars: str = "") -> str:
    name, *others = (
        f"<td{_style(column)}>{_breakable(cell) if column in TEXT_COLUMNS else escape(cell)}"
        for column, cell in zip(columns, line.cells, strict=True)
    )
    return "</td>".join([name + bars, *others, ""])


def _style(column: str) -> str:
    return ' class="text"' if column in TEXT_COLUMNS else ""


def _breakable(text: str) -> str:
    """Lets a browser break lines after the dots of a name, and not between a number and what it counts."""
    return re.sub(r"(?<=\d) (?=\w)", "&nbsp;", escape(text)).replace(".", ".<wbr>")


def _memory_of(unit: UnitFacts) -> dict[str, Memory]:
    """Returns what bars show of a unit, by their style: memory that is not empty."""
    columns = {"kept": unit.kept, "gathered": unit.gathered}
    return {style: memory for style, memory in columns.items() if memory is not None and memory.nbytes}


def _bars(unit: UnitFacts, most: int) -> str:
    """Draws a unit's memory, in proportion to the unit with the most."""
    return "".join(
        f'<div class="bar {style} {_colour(memory)}" style="width: {100 * memory.nbytes / most:.1f}%" '
        f'title="{style}: {amount(memory)}"></div>'
        for style, memory in _memory_of(unit).items()
    )


def _colour(memory: Memory) -> str:
    name = dtype_names(memory.dtypes)
    return name if name in ("fp32", "bf16", "fp16", "fp64") else "mixed"
