"""Tables of plans: memory, time, bytes on the wire, what a search and a sweep found, and which wrapper to take."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..base.text import aligned, bytes_cell, readable_bytes
from ..distributed.report.page import page
from ..distributed.report.table import count
from .estimates import RESERVED_BYTES, WRAPPERS, Estimate, Wire
from .pictures import draw_steps, draw_throughput, draw_wire, picture
from .search import Candidate, Scaling
from .simulation import CATEGORIES

_SPARE = 0.05
"""Share of an accelerator's memory that a recommended wrapper leaves, if any does, next to `RESERVED_BYTES`."""


@dataclass(frozen=True)
class Table:
    """Cells of a table, whose first column is aligned left, with notes below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def lines(self, width: int) -> Iterator[str]:
        """Yields lines of at most `width` characters. Columns that do not fit follow below the others."""
        label, *others = zip(self.columns, *self.rows, strict=True)
        blocks = [[label]]
        for column in others:
            if len(blocks[-1]) > 1 and max(map(len, aligned([*zip(*blocks[-1], column, strict=True)]))) > width:
                blocks.append([label])
            blocks[-1].append(column)
        for block in blocks:
            head, *rows = aligned([*zip(*block, strict=True)])
            yield from ("", head, "-" * len(head), *rows)
        for note in self.notes:
            yield from textwrap.wrap(note, width)


def as_text(title: str, advice: str, tables: Sequence[Table]) -> str:
    """Returns tables that fit the terminal: COLUMNS characters, or 80 without a terminal."""
    width = shutil.get_terminal_size().columns
    lines = [line for table in tables for line in table.lines(width)]
    return "\n".join([*textwrap.wrap(title, width), *lines, "", *textwrap.wrap(advice, width), ""])


def as_html(
    title: str, advice: str, tables: Sequence[Table], estimates: Sequence[Estimate], sweep: Sequence[Scaling]
) -> str:
    """Returns one self-contained page with the tables, and pictures of them.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    sections: list[dict[str, Any]] = [{"num_text": 1, **asdict(table)} for table in tables]
    number, wire = len(estimates), [*estimates] if any(estimate.wire for estimate in estimates) else []
    for heading, draw, inches, values in (
        ("Memory and queues of a rank over a step", draw_steps, 3.6 * number, estimates),
        ("Sent by a rank in a step", draw_wire, 1 + 0.4 * number, wire),
        ("Throughput of a rank over numbers of ranks", draw_throughput, 4.0, sweep),
    ):
        if values:
            sections.append({"heading": heading, "svg": picture(draw, inches, values)})
    return page(title, sections, advice)


def recommendation(estimates: Sequence[Estimate]) -> str:
    """Says which wrapper to take, and why: the fastest of those that fit and leave `_SPARE`, or else that fit."""
    fitting = sorted((e for e in estimates if e.fits), key=lambda e: (e.time.step_s, e.peak_bytes))
    if not fitting:
        return "No wrapper fits."
    best = next((e for e in fitting if e.spare_bytes >= _SPARE * e.hardware.memory_bytes), fitting[0])
    reasons = [f"fits with {readable_bytes(best.spare_bytes)} to spare"]
    for other in [e for e in fitting if e is not best][:1]:
        faster = other.time.step_s / best.time.step_s - 1
        if faster < 0:
            reasons.append(f"{other.wrapper} is {-faster:.1%} faster, with only {readable_bytes(other.spare_bytes)}")
        else:
            reasons.append(f"{faster:.1%} faster than {other.wrapper}, the next")
    if too_large := [e.wrapper for e in estimates if not e.fits]:
        reasons.append(f"{' and '.join(too_large)} do{'es' * (len(too_large) == 1)} not fit")
    return f"Use {best.wrapper} ({' '.join(WRAPPERS[best.wrapper])}): {'; '.join(reasons)}."


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


def headline(estimate: Estimate) -> str:
    """Says which run is planned."""
    config, number = estimate.config, estimate.simulation.num_microbatches
    sizes = {kind: getattr(config.model, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")}
    sizes["context"] = config.model.context_parallel_size
    over = "".join(f", {kind}-parallel {size}" for kind, size in sizes.items() if size > 1)
    assumed = "" if config.model.num_moe_experts is None else "; experts are taken to have equally many tokens"
    return (
        f"{count(estimate.num_parameters)} parameters on {estimate.world_size} {estimate.hardware.name}{over}; "
        f"{number} micro-batch{'es' if number > 1 else ''} of {config.data.micro_batch_size} x "
        f"{config.data.seq_length} tokens{assumed}"
    )


def wrapper_tables(estimates: Sequence[Estimate], refused: Sequence[str]) -> Iterator[Table]:
    """Yields the tables of all wrappers: memory, time and operations, and bytes on the wire.

    Args:
        refused: a note for each wrapper that the run would refuse.
    """
    numbers, names = [e.as_json() for e in estimates], [e.wrapper for e in estimates]

    def rows(of: Mapping[str, tuple[str, Callable[[Any], str]]]) -> list[list[str]]:
        return [
            [label, *(form(each[key]) for each in numbers)]
            for label, (key, form) in of.items()
            if key != "bubble_s" or any(each[key] for each in numbers)
        ]

    parts = [[category, *(bytes_cell(each["bytes_at_peak"][category]) for each in numbers)] for category in CATEGORIES]
    wrappers_at: dict[str, list[str]] = {}
    for each in numbers:
        wrappers_at.setdefault(each["peak_at"], []).append(each["wrapper"])
    moments = [f"peak of {', '.join(wrappers)}: {moment}" for moment, wrappers in wrappers_at.items()]
    left = f"{bytes_cell(RESERVED_BYTES)} left to driver, NCCL, workspaces and fragmentation"
    fits = f"fits: in {bytes_cell(estimates[0].hardware.memory_bytes)}, with {left}"
    yield Table(["memory of a rank", *names], [*parts, *rows(_MEMORY)], [*moments, fits, *refused])
    host = estimates[0].hardware
    assumed = (
        f"copies to and from the host at {host.host_bandwidth / 1e9:.0f} GB/s, and its memory at "
        f"{host.host_memory_bandwidth / 1e9:.0f} GB/s for each accelerator: both are assumed, not measured"
    )
    offloads = any(entry.kind.endswith("the host") for e in estimates for entry in e.wire)
    yield Table(["time of a step", *names], rows(_COSTS), [assumed] * offloads)
    sent = [{(entry.kind, entry.ranks): entry for entry in e.wire} for e in estimates]
    cells = {key: [of.get(key) for of in sent] for key in sorted({key for of in sent for key in of})}
    wire = [
        [f"{kind} over {ranks}" if ranks > 1 else kind, *map(_sent, entries)]
        for (kind, ranks), entries in cells.items()
    ]
    note = "calls, bytes that stay in the node + bytes that leave it" if wire else "nothing"
    yield Table(["sent in a step", *names], wire, [note])


def _sent(wire: Wire | None) -> str:
    if wire is None:
        return "-"
    inside = wire.sent_bytes - wire.crossing_bytes
    return f"{wire.calls} x, {bytes_cell(inside)} + {bytes_cell(wire.crossing_bytes)}"


def search_table(candidates: Sequence[Candidate], most: int = 10) -> Table:
    """Returns the fastest candidates."""
    rows = [
        [c.name, bytes_cell(c.peak_bytes), _seconds(c.step_s), f"{c.tokens_per_second:,.0f}"]
        for c in candidates[:most]
    ]
    columns = ["what fits, the fastest first", "peak", "step", "tokens/s of a rank"]
    return Table(columns, rows, [] if rows else ["nothing fits"])


def sweep_table(sweep: Sequence[Scaling]) -> Table:
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
    return Table(["tokens/s of a rank", *(s.name for s in sweep)], rows, notes)
