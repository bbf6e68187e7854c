"""Self-contained pages of tables and pictures, light and dark, wide and narrow: the description of a wrapped model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from .table import (
    TEXT_COLUMNS,
    Memory,
    ModelFacts,
    UnitFacts,
    amount,
    dtype_names,
    headline,
    notes,
    recommendation,
    table,
)


def page(title: str, sections: Sequence[Mapping[str, Any]], recommendation: str = "") -> str:
    """Returns a page of HTML, whose title is also its heading. Escapes every text.

    Args:
        sections: each with any of: heading; svg, a picture; columns, rows and total, a table of texts, whose first
            `num_text` columns are aligned left, with bars below the first cell of each row; notes, a list of lines;
            legend, names by color of bars; explains_columns, for those of `table`.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html").render(title=title, sections=sections, recommendation=recommendation)


def _breakable(text: str) -> Markup:
    """Lets a browser break lines after the dots of a name, and not between a number and what it counts."""
    return Markup(re.sub(r"(?<=\d) (?=\w)", "&nbsp;", escape(text)).replace(".", ".<wbr>"))


def as_html(facts: ModelFacts) -> str:
    """Returns a page with the table, a bar for what a unit keeps and one for what it gathers, and the notes."""
    grid = table(facts)
    bars = [[*_bars(line.unit)] for line in grid.lines[:-1]]
    most = max((memory.nbytes for of_unit in bars for _, memory in of_unit), default=1)
    colours = {_colour(memory): dtype_names(memory.dtypes) for of_unit in bars for _, memory in of_unit}
    section = {
        "columns": grid.columns,
        "num_text": len(TEXT_COLUMNS),
        "rows": [line.cells for line in grid.lines[:-1]],
        "total": grid.lines[-1].cells,
        "bars": [
            [(style, _colour(memory), 100 * memory.nbytes / most, amount(memory)) for style, memory in of_unit]
            for of_unit in bars
        ],
        "legend": colours,
        "longest": amount(Memory(most)),
        "notes": notes(facts),
        "explains_columns": True,
    }
    return page(headline(facts), [section], recommendation(facts))


def _bars(unit: UnitFacts) -> Iterator[tuple[str, Memory]]:
    """Yields what bars show of a unit, by their style: memory that is not empty."""
    for style, memory in (("kept", unit.kept), ("gathered", unit.gathered)):
        if memory is not None and memory.nbytes:
            yield style, memory


def _colour(memory: Memory) -> str:
    name = dtype_names(memory.dtypes)
    return name if name in ("fp32", "bf16", "fp16", "fp64") else "mixed"
