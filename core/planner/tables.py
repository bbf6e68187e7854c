"""Formats estimates: as text, and as one self-contained page with memory over the step and throughput over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..base.errors import ConfigError
from ..base.text import aligned, bytes_cell, readable_bytes
from ..distributed.report.page import page
from .estimates import RESERVED_BYTES, Estimate, Wire
from .search import Candidate, Scaling
from .simulation import CATEGORIES

Result = Estimate | ConfigError
"""What is known of a wrapper: its costs, or why the run would refuse it."""


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


_MEMORY: dict[str, tuple[str, Callable[[Any], str]]] = {
    "peak": ("peak_bytes", bytes_cell),
    "closed formula": ("formula_bytes", lambda parts: bytes_cell(sum(parts.values()))),
    "while it is built": ("construction_peak_bytes", bytes_cell),
    "fits": ("fits", lambda fits: "yes" if fits else "NO"),
}
_COSTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step": ("step_s", _seconds),
    "computation": ("compute_s", _seconds),
    "communication, exposed": ("exposed_s", _seconds),
    "communication, hidden": ("hidden_s", _seconds),
    "bubble of the pipeline": ("bubble_s", _seconds),
    "model TFLOP of all ranks": ("model_flops", lambda flops: f"{flops / 1e12:,.1f}"),
    "hardware TFLOP of a rank": ("hardware_flops_per_rank", lambda flops: f"{flops / 1e12:,.1f}"),
    "MFU": ("mfu", "{:.1%}".format),
    "tokens/s of a rank": ("tokens_per_second_per_rank", "{:,.0f}".format),
}
"""Rows of a table, each with its entry of `Estimate.as_json` and its format."""


def as_text(results: Mapping[str, Result]) -> str:
    """Returns the tables of all wrappers: memory, time and operations, and bytes on the wire."""
    found = [result for result in results.values() if isinstance(result, Estimate)]
    refused = [f"{name}: {result}" for name, result in results.items() if isinstance(result, ConfigError)]
    parts = [headline(found[0]), *_tables(found)] if found else []
    return "\n\n".join([*parts, *(["\n".join(["refused", *refused])] if refused else [])]) + "\n"


def headline(estimate: Estimate) -> str:
    """Says which run is planned."""
    config, number = estimate.config, estimate.simulation.num_microbatches
    sizes = {kind: getattr(config.model, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")}
    sizes["context"] = config.model.context_parallel_size
    over = "".join(f", {kind}-parallel {size}" for kind, size in sizes.items() if size > 1)
    assumed = "" if config.model.num_moe_experts is None else "; experts are taken to have equally many tokens"
    return (
        f"{estimate.num_parameters / 1e9:.4g} B parameters on {estimate.world_size} {estimate.hardware.name}{over}; "
        f"{number} micro-batch{'es' if number > 1 else ''} of {config.data.micro_batch_size} x "
        f"{config.data.seq_length} tokens{assumed}"
    )


def _tables(estimates: Sequence[Estimate]) -> Iterable[str]:
    numbers, names = [e.as_json() for e in estimates], [e.wrapper for e in estimates]

    def rows(of: Mapping[str, tuple[str, Callable[[Any], str]]]) -> list[list[str]]:
        return [
            [label, *(form(each[key]) for each in numbers)]
            for label, (key, form) in of.items()
            if key != "bubble_s" or any(each[key] for each in numbers)
        ]

    parts = [[category, *(bytes_cell(each["bytes_at_peak"][category]) for each in numbers)] for category in CATEGORIES]
    memory = text_table(["memory of a rank", *names], [*parts, *rows(_MEMORY)])
    moments = [f"peak of {each['wrapper']}: {each['peak_at']}" for each in numbers]
    left = f"{bytes_cell(RESERVED_BYTES)} left to driver, NCCL, workspaces and fragmentation"
    yield "\n".join([memory, *moments, f"fits: in {bytes_cell(estimates[0].hardware.memory_bytes)}, with {left}"])
    host = estimates[0].hardware
    assumed = (
        f"\ncopies to and from the host at {host.host_bandwidth / 1e9:.0f} GB/s, and its memory at "
        f"{host.host_memory_bandwidth / 1e9:.0f} GB/s for each accelerator: both are assumed, not measured"
    )
    offloads = any(entry.kind.endswith("the host") for e in estimates for entry in e.wire)
    yield text_table(["time of a step", *names], rows(_COSTS)) + assumed * offloads
    sent = [{(entry.kind, entry.ranks): entry for entry in e.wire} for e in estimates]
    cells = {key: [of.get(key) for of in sent] for key in sorted({key for of in sent for key in of})}
    wire = [
        [f"{kind} over {ranks}" if ranks > 1 else kind, *map(_sent, entries)]
        for (kind, ranks), entries in cells.items()
    ]
    note = "\ncalls, bytes that stay in the node + bytes that leave it"
    yield text_table(["sent in a step", *names], wire) + note if wire else "sent in a step: nothing"


def _sent(wire: Wire | None) -> str:
    if wire is None:
        return "-"
    inside = wire.sent_bytes - wire.crossing_bytes
    return f"{wire.calls} x, {bytes_cell(inside)} + {bytes_cell(wire.crossing_bytes)}"


def search_table(candidates: Sequence[Candidate], most: int = 10) -> str:
    """Returns the fastest candidates."""
    rows = [
        [c.name, bytes_cell(c.peak_bytes), _seconds(c.step_s), f"{c.tokens_per_second:,.0f}"]
        for c in candidates[:most]
    ]
    columns = ["what fits, the fastest first", "peak", "step", "tokens/s of a rank"]
    return text_table(columns, rows) if rows else "nothing fits"


def sweep_table(sweep: Sequence[Scaling]) -> str:
    """Returns the throughput of a rank by number of ranks, and why a wrapper stops scaling."""
    ranks = sorted({point.world_size for scaling in sweep for point in scaling.points})
    by_ranks = [{point.world_size: point for point in scaling.points} for scaling in sweep]
    rows = [
        [f"{n:,}", *(f"{points[n].tokens_per_second:,.0f}" if n in points else "-" for points in by_ranks)]
        for n in ranks
    ]
    notes = []
    for scaling, points in zip(sweep, by_ranks, strict=True):
        if (stop := scaling.stops_at) is None:
            notes.append(f"{scaling.name}: scales to {ranks[-1]:,} ranks")
            continue
        at = points[stop]
        notes.append(
            f"{scaling.name}: below 90 % from {stop:,} ranks on, where {at.exposed_s / at.step_s:.0%} of a step waits "
            f"for collectives, whose latencies add up to {_seconds(at.latency_s)}"
        )
    return "\n".join([text_table(["tokens/s of a rank", *(s.name for s in sweep)], rows), *notes])


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with a rule below the names of the columns."""
    head, *lines = aligned([columns, *rows])
    return "\n".join([head, "-" * len(head), *lines])


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
