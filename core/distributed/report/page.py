"""The facts as one self-contained page: the table, in which bars show bytes, and notes. Light and dark."""

from __future__ import annotations

import re
from html import escape

from .table import TEXT_COLUMNS, Line, Memory, ModelFacts, UnitFacts, amount, dtype_names, headline, notes, table

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --faint: #667085; --line: #d6dbe3;
  --soft: #f4f6f9; --fp32: #3b76c9; --bf16: #d9822b; --fp16: #2c9a6b; --fp64: #8256c4; --mixed: #78828f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e5e9f0; --faint: #97a1b1; --line: #343c4a;
  --soft: #1c222c; --fp32: #6ea0ea; --bf16: #eda052; --fp16: #53bd8e; --fp64: #a884e3; --mixed: #97a1b1; } }
body { margin: 0 auto; padding: 2rem 1.5rem 3rem; max-width: 1160px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; margin: 0 0 1rem; }
.legend, .notes { color: var(--faint); font-size: 0.87rem; }
.legend i { display: inline-block; width: 0.8rem; height: 0.8rem; margin: 0 0.4rem 0 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
.text { text-align: left; } td.text { white-space: normal; overflow-wrap: break-word; }
tbody tr:hover { background: var(--soft); } tfoot td { font-weight: 600; border-bottom: 0; }
.notes { margin-top: 1.2rem; padding-left: 1.1rem; }
.bar { height: 5px; margin-top: 2px; min-width: 1px; } .gathered { opacity: 0.35; }
.fp32 { background: var(--fp32); } .bf16 { background: var(--bf16); } .fp16 { background: var(--fp16); }
.fp64 { background: var(--fp64); } .mixed { background: var(--mixed); }
"""


def as_html(facts: ModelFacts) -> str:
    """Returns a page with the table, a bar for what a unit keeps and one for what it gathers, and the notes.

    Escapes every name.
    """
    title, grid = escape(headline(facts)), table(facts)
    head = "".join(f"<th{_style(column)}>{escape(column)}</th>" for column in grid.columns)
    most = max((memory.nbytes for unit in facts.units for memory in _memory_of(unit).values()), default=1)
    rows = "\n".join(f"<tr>{_row(grid.columns, line, _bars(line.unit, most))}</tr>" for line in grid.lines[:-1])
    items = "\n".join(f"<li>{escape(note)}</li>" for note in notes(facts))
    body = f"""<div class="scroll">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
<tfoot><tr>{_row(grid.columns, grid.lines[-1])}</tr></tfoot>
</table>
</div>
<p class="legend">Bars: what this rank keeps, and paler the same while it is gathered.{_legend(facts)}</p>
<ul class="notes">
{items}
</ul>"""
    return page(title, body)


def page(title: str, body: str, style: str = "") -> str:
    """Returns a page of HTML, whose title is also its heading.

    Args:
        style: CSS in addition to that of all pages.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


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
    """Draws a unit's memory, in proportion to that of the unit with the most."""
    return "".join(
        f'<div class="bar {style} {_colour(memory)}" style="width: {100 * memory.nbytes / most:.1f}%" '
        f'title="{style}: {amount(memory)}"></div>'
        for style, memory in _memory_of(unit).items()
    )


def _colour(memory: Memory) -> str:
    name = dtype_names(memory.dtypes)
    return name if name in ("fp32", "bf16", "fp16", "fp64") else "mixed"


def _legend(facts: ModelFacts) -> str:
    memories = (memory for unit in facts.units for memory in _memory_of(unit).values())
    colours = dict.fromkeys((_colour(memory), dtype_names(memory.dtypes)) for memory in memories)
    return "".join(f'<i class="{colour}"></i>{escape(names)}' for colour, names in colours)
