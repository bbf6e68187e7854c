"""The plan as one self-contained page: its tables, memory over the step, and throughput over numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ..base.text import readable_bytes
from ..distributed.report.page import page
from .estimates import Estimate
from .search import Scaling
from .simulation import CATEGORIES
from .tables import Result, headline

_COLORS = ("#3b76c9", "#8fb8ec", "#d9822b", "#8256c4", "#9aa5b1", "#2c9a6b", "#c4566f")
_WIDTH, _HEIGHT = 1000, 260
_MOST_MOMENTS = 500
"""Moments that are drawn. Of those that are closer together, the one with the most memory is."""


_STYLE = (
    "h2 { font-size: 1rem; } svg { width: 100%; overflow: visible; } text { fill: currentColor; font-size: 13px; }"
)


def as_html(results: Mapping[str, Result], text: str, sweep: Sequence[Scaling]) -> str:
    """Returns the page. Escapes every name."""
    found = [result for result in results.values() if isinstance(result, Estimate)]
    most = max((estimate.peak_bytes for estimate in found), default=1)
    parts = [f'<div class="scroll"><pre>{escape(text)}</pre></div>']
    for estimate in found:
        parts.append(f"<h2>{escape(estimate.wrapper)}: memory over the step</h2>{_memory(estimate, most)}")
    if sweep:
        parts.append(f"<h2>tokens/s of a rank over ranks</h2>{_throughput(sweep)}")
    return page(escape(headline(found[0])) if found else "nothing was planned", "".join(parts), _STYLE)


def _memory(estimate: Estimate, most: int) -> str:
    """Draws the categories as stacked areas over the changes of memory in the step."""
    moments = estimate.simulation.timeline
    width = -(-len(moments) // _MOST_MOMENTS)
    starts = range(0, len(moments), width)
    timeline = [max(moments[start : start + width], key=lambda moment: moment.nbytes) for start in starts]
    places = [_WIDTH * index / max(len(timeline) - 1, 1) for index in range(len(timeline))]
    below, areas = [0] * len(timeline), []
    for index, color in enumerate(_COLORS):
        above = [low + moment.held[index] for low, moment in zip(below, timeline, strict=True)]
        outline = [*zip(places, above, strict=True), *reversed([*zip(places, below, strict=True)])]
        areas.append(f'<polygon fill="{color}" points="{_points(outline, most)}"/>')
        below = above
    peak = estimate.simulation.peak
    note = escape(f"peak {readable_bytes(peak.nbytes)}, {peak.where}; height {readable_bytes(most)}")
    return _picture(areas, zip(CATEGORIES, _COLORS, strict=True), note)


def _throughput(sweep: Sequence[Scaling]) -> str:
    points = [point for scaling in sweep for point in scaling.points]
    most, ranks = max(p.tokens_per_second for p in points), sorted({p.world_size for p in points})
    places = {number: _WIDTH * index / max(len(ranks) - 1, 1) for index, number in enumerate(ranks)}
    lines = [
        f'<polyline fill="none" stroke-width="2" stroke="{color}" points="'
        f'{_points([(places[p.world_size], p.tokens_per_second) for p in scaling.points], most)}"/>'
        for scaling, color in zip(sweep, _COLORS, strict=False)
    ]
    marks = [
        f'<text x="{place:.0f}" y="{_HEIGHT + 16}" text-anchor="middle">{number:,}</text>'
        for number, place in places.items()
    ]
    names = zip((scaling.name for scaling in sweep), _COLORS, strict=False)
    return _picture([*lines, *marks], names, f"up to {most:,.0f} tokens/s")


def _points(points: Iterable[tuple[float, float]], most: float) -> str:
    return " ".join(f"{x:.1f},{_HEIGHT * (1 - y / most):.1f}" for x, y in points)


def _picture(shapes: Iterable[str], legend: Iterable[tuple[str, str]], note: str) -> str:
    names = "".join(f'<i style="background: {color}"></i>{escape(name)}' for name, color in legend)
    drawn = "".join(shapes)
    return f'<svg viewBox="-20 0 {_WIDTH + 40} {_HEIGHT + 20}">{drawn}</svg><p class="legend">{names}. {note}</p>'
