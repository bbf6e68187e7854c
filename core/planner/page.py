"""The plan as one self-contained page: its tables, memory over the step, and throughput over numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ..base.text import readable_bytes
from ..distributed.report.page import STYLE
from .estimates import Estimate
from .search import Scaling
from .simulation import CATEGORIES
from .tables import Result, headline

_COLORS = ("#3b76c9", "#8fb8ec", "#d9822b", "#8256c4", "#9aa5b1", "#2c9a6b", "#c4566f")
_WIDTH, _HEIGHT = 1000, 260
_MOST_MOMENTS = 500
"""Moments that are drawn. Of those that are closer together, the one with the most memory is."""


def as_html(results: Mapping[str, Result], text: str, sweep: Sequence[Scaling]) -> str:
    """Returns the page. Escapes every name."""
    found = [result for result in results.values() if isinstance(result, Estimate)]
    most = max((estimate.peak_bytes for estimate in found), default=1)
    title = escape(headline(found[0])) if found else "nothing was planned"
    pictures = [f"<h2>{escape(e.wrapper)}: memory over the step</h2>{_memory(e, most)}" for e in found]
    if sweep:
        pictures.append(f"<h2>tokens/s of a rank over ranks</h2>{_throughput(sweep)}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}h2 {{ font-size: 1rem; }} svg {{ width: 100%; }} text {{ fill: currentColor; font-size: 11px; }}</style>
</head>
<body>
<h1>{title}</h1>
<div class="scroll"><pre>{escape(text)}</pre></div>
{"".join(pictures)}
</body>
</html>
"""


def _memory(estimate: Estimate, most: int) -> str:
    """Draws the categories as stacked areas over the changes of memory in the step."""
    moments = estimate.simulation.timeline
    width = -(-len(moments) // _MOST_MOMENTS)
    starts = range(0, len(moments), width)
    timeline = [max(moments[start : start + width], key=lambda moment: moment.nbytes) for start in starts]
    below = [0.0] * len(timeline)
    areas = []
    for index, color in enumerate(_COLORS):
        above = [low + moment.held[index] for low, moment in zip(below, timeline, strict=True)]
        areas.append(f'<polygon fill="{color}" points="{_points([*above, *below[::-1]], most)}"/>')
        below = above
    legend = _legend(zip(CATEGORIES, _COLORS, strict=True))
    peak = estimate.simulation.peak
    note = escape(f"peak {readable_bytes(peak.nbytes)}, {peak.where}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(areas)}</svg><p class="legend">{legend} {note}</p>'


def _points(heights: Sequence[float], most: float) -> str:
    """Returns the points of an area: its upper edge from the left, then its lower one from the right."""
    half = len(heights) // 2
    places = [*range(half), *range(half - 1, -1, -1)]
    scale = _WIDTH / max(half - 1, 1)
    return " ".join(f"{scale * x:.1f},{_HEIGHT * (1 - y / most):.1f}" for x, y in zip(places, heights, strict=True))


def _throughput(sweep: Sequence[Scaling]) -> str:
    points = [point for scaling in sweep for point in scaling.points]
    most, first = max(p.tokens_per_second for p in points), min(p.world_size for p in points)
    scale = _WIDTH / max(math.log2(max(p.world_size for p in points) / first), 1)
    lines = [
        f'<polyline fill="none" stroke-width="2" stroke="{color}" points="'
        + " ".join(
            f"{scale * math.log2(p.world_size / first):.1f},{_HEIGHT * (1 - p.tokens_per_second / most):.1f}"
            for p in scaling.points
        )
        + '"/>'
        for scaling, color in zip(sweep, _COLORS, strict=False)
    ]
    ranks = sorted({p.world_size for p in points})
    marks = [f'<text x="{scale * math.log2(n / first):.1f}" y="{_HEIGHT - 2}">{n}</text>' for n in ranks]
    legend = _legend(zip((scaling.name for scaling in sweep), _COLORS, strict=False))
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(lines + marks)}</svg>'
    return f'{picture}<p class="legend">{legend} up to {most:,.0f} tokens/s</p>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<i style="background: {color}"></i>{escape(name)}' for name, color in entries)
