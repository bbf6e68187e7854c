"""Formats estimates as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.errors import ConfigError
from ..base.text import readable_bytes
from .estimates import RESERVED_BYTES, Estimate
from .search import Candidate, Scaling
from .simulation import CATEGORIES

Result = Estimate | ConfigError
"""What is known of a wrapper: its costs, or why the run would refuse it."""


def as_text(results: Mapping[str, Result]) -> str:
    """Returns the tables of all wrappers: memory, time and operations, and bytes on the wire."""
    found = [result for result in results.values() if isinstance(result, Estimate)]
    refused = [f"{name}: {result}" for name, result in results.items() if isinstance(result, ConfigError)]
    parts = [headline(found[0]), memory_table(found), cost_table(found), wire_table(found)] if found else []
    return "\n\n".join([*parts, *(["\n".join(["refused", *refused])] if refused else [])]) + "\n"


def headline(estimate: Estimate) -> str:
    """Says which run is planned."""
    config, simulation = estimate.config, estimate.simulation
    model, data = config.model, config.data
    sizes = {"tensor": model.tensor_model_parallel_size, "context": model.context_parallel_size}
    over = "".join(f", {kind}-parallel {size}" for kind, size in sizes.items() if size > 1)
    number = simulation.num_microbatches
    return (
        f"{simulation.num_parameters / 1e9:.4g} B parameters on {estimate.world_size} {estimate.hardware.name}{over}; "
        f"{number} micro-batch{'es' if number > 1 else ''} of {data.micro_batch_size} x {data.seq_length} tokens"
    )


def memory_table(estimates: Sequence[Estimate]) -> str:
    """Returns the peak of each wrapper by category, and the closed formula."""
    columns = ["memory of a rank", *(e.wrapper for e in estimates)]
    rows = [
        [category, *(_size(e.simulation.peak.held[index]) for e in estimates)]
        for index, category in enumerate(CATEGORIES)
    ]
    rows += [
        ["peak", *(_size(e.peak_bytes) for e in estimates)],
        ["closed formula", *(_size(sum(e.formula_bytes.values())) for e in estimates)],
        ["while it is built", *(_size(e.simulation.construction_peak) for e in estimates)],
        [f"fits {_size(estimates[0].gpu_memory)}", *("yes" if e.fits else "NO" for e in estimates)],
    ]
    moments = [f"peak of {e.wrapper}: {e.simulation.peak.where}" for e in estimates]
    note = f"fits: with {_size(RESERVED_BYTES)} left to driver, NCCL, workspaces and fragmentation"
    return "\n".join([text_table(columns, rows), *moments, note])


def cost_table(estimates: Sequence[Estimate]) -> str:
    """Returns time and operations of a step under each wrapper."""
    rows = [
        ["step", *(_seconds(e.time.step_s) for e in estimates)],
        ["computation", *(_seconds(e.time.compute_s) for e in estimates)],
        ["communication, exposed", *(_seconds(e.time.exposed_s) for e in estimates)],
        ["communication, hidden", *(_seconds(e.time.hidden_s) for e in estimates)],
        ["model TFLOP of all ranks", *(f"{e.model_flops / 1e12:,.1f}" for e in estimates)],
        ["hardware TFLOP of a rank", *(f"{e.simulation.hardware_flops / 1e12:,.1f}" for e in estimates)],
        ["MFU", *(f"{100 * e.mfu:.1f} %" for e in estimates)],
        ["tokens/s of a rank", *(f"{e.tokens_per_second:,.0f}" for e in estimates)],
    ]
    return text_table(["time of a step", *(e.wrapper for e in estimates)], rows)


def wire_table(estimates: Sequence[Estimate]) -> str:
    """Returns what a rank sends in a step, by collective and group: calls, bytes inside the node and beyond."""
    keys = sorted({(entry.kind, entry.ranks) for e in estimates for entry in e.wire})
    rows = []
    for kind, ranks in keys:
        cells = []
        for e in estimates:
            entry = next((entry for entry in e.wire if (entry.kind, entry.ranks) == (kind, ranks)), None)
            inside = entry.sent_bytes - entry.crossing_bytes if entry else 0
            cells.append(f"{entry.calls} x, {_size(inside)} + {_size(entry.crossing_bytes)}" if entry else "-")
        rows.append([f"{kind} over {ranks}", *cells])
    if not rows:
        return "sent in a step: nothing"
    head = ["sent in a step", *(e.wrapper for e in estimates)]
    return text_table(head, rows) + "\ncalls, bytes that stay in the node + bytes that leave it"


def search_table(candidates: Sequence[Candidate], most: int = 10) -> str:
    """Returns the fastest candidates."""
    rows = [
        [c.name, _size(c.peak_bytes), _seconds(c.step_s), f"{c.tokens_per_second:,.0f}"] for c in candidates[:most]
    ]
    if not rows:
        return "nothing fits"
    return text_table(["what fits, the fastest first", "peak", "step", "tokens/s of a rank"], rows)


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
        share = 100 * at.exposed_s / at.step_s
        notes.append(
            f"{scaling.name}: below 90 % from {stop:,} ranks on, where {share:.0f} % of a step waits for collectives, "
            f"whose latencies add up to {_seconds(at.latency_s)}"
        )
    return "\n".join([text_table(["tokens/s of a rank", *(s.name for s in sweep)], rows), *notes])


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns lines with the first column on the left and the others on the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in (columns, *rows)]  # fmt: skip
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def _size(nbytes: int) -> str:
    return readable_bytes(nbytes) if nbytes else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
