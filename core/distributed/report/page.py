"""The facts as one self-contained page: a picture, the table, notes. Light and dark."""

from __future__ import annotations

import re
from html import escape

from .facts import ModelFacts
from .picture import as_svg, dtypes_shown
from .rows import TEXT_COLUMNS, Table, dtype_names, headline, notes, table

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --faint: #667085; --line: #d6dbe3;
  --soft: #f4f6f9; --fp32: #3b76c9; --bf16: #d9822b; --fp16: #2c9a6b; --fp64: #8256c4; --mixed: #78828f;
  --tie: #b8357f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e5e9f0; --faint: #97a1b1; --line: #343c4a;
  --soft: #1c222c; --fp32: #6ea0ea; --bf16: #eda052; --fp16: #53bd8e; --fp64: #a884e3; --mixed: #97a1b1;
  --tie: #e878b2; } }
body { margin: 0 auto; padding: 2rem 1.5rem 3rem; max-width: 1160px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; margin: 0 0 1rem; }
figure { margin: 0 0 2rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption, .notes { color: var(--faint); font-size: 0.87rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 0.4rem 0; }
.legend i { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.4rem;
  vertical-align: -0.08rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
.text { text-align: left; } td.text { white-space: normal; overflow-wrap: break-word; }
tbody tr:hover { background: var(--soft); } tfoot td { font-weight: 600; border-bottom: 0; }
.notes { margin-top: 1.2rem; padding-left: 1.1rem; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); }
svg .faint { fill: var(--faint); } svg .axis, svg .leader { stroke: var(--line); fill: none; }
svg .axis { stroke: var(--faint); } svg .gathered { fill-opacity: 0.28; stroke-width: 1; }
svg .tie { fill: none; stroke: var(--tie); stroke-width: 1.5; }
svg .alias { fill: none; stroke: var(--tie); stroke-dasharray: 3 2; }
svg .hatch { stroke: var(--paper); stroke-width: 1.6; stroke-opacity: 0.6; }
.fp32 { fill: var(--fp32); stroke: var(--fp32); background: var(--fp32); }
.bf16 { fill: var(--bf16); stroke: var(--bf16); background: var(--bf16); }
.fp16 { fill: var(--fp16); stroke: var(--fp16); background: var(--fp16); }
.fp64 { fill: var(--fp64); stroke: var(--fp64); background: var(--fp64); }
.mixed { fill: var(--mixed); stroke: var(--mixed); background: var(--mixed); }
"""

_LEGEND = {
    "sharded": "Below the line what this rank keeps, above it the same parameters while they are gathered.",
    "replicated": "Hatched: whole on every rank.",
    "tied": "An arc joins the places of one tied weight.",
}


def as_html(facts: ModelFacts) -> str:
    """Returns a page with the picture of the units, the table and the notes; escapes every name."""
    title = escape(headline(facts))
    of_units = table(facts)
    head = "".join(f"<th{_style(column)}>{escape(column)}</th>" for column in of_units.columns)
    rows = "\n".join(f"<tr>{_cells(of_units, line)}</tr>" for line in of_units.body)
    said = "\n".join(f"<li>{escape(note)}</li>" for note in notes(facts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<figure>
{as_svg(facts)}
{_legend(facts)}
</figure>
<div class="scroll">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
<tfoot><tr>{_cells(of_units, of_units.foot)}</tr></tfoot>
</table>
</div>
<ul class="notes">
{said}
</ul>
</body>
</html>
"""


def _cells(of_units: Table, line: tuple[str, ...]) -> str:
    return "".join(
        f"<td{_style(column)}>{_breakable(cell) if column in TEXT_COLUMNS else escape(cell)}</td>"
        for column, cell in zip(of_units.columns, line, strict=True)
    )


def _style(column: str) -> str:
    return ' class="text"' if column in TEXT_COLUMNS else ""


def _breakable(text: str) -> str:
    """Lets a browser break lines after the dots of a name, and not between a number and what it counts."""
    return re.sub(r"(?<=\d) (?=\w)", "&nbsp;", escape(text)).replace(".", ".<wbr>")


def _legend(facts: ModelFacts) -> str:
    colours = "".join(
        f'<span><i class="{kind}"></i>{escape(dtype_names(dtypes))}</span>' for kind, dtypes in dtypes_shown(facts)
    )
    said = ["Units in the order of the model; areas are in proportion to bytes, but for the narrowest boxes."]
    if any(not unit.is_replicated for unit in facts.units):
        said.append(_LEGEND["sharded"])
    if any(unit.is_replicated for unit in facts.units):
        said.append(_LEGEND["replicated"])
    if facts.ties:
        said.append(_LEGEND["tied"])
    return f'<div class="legend">{colours}</div>\n<figcaption>{escape(" ".join(said))}</figcaption>'
