"""Draws the page of benchmarks over time from `benchmarks/results/history.jsonl`, one picture a benchmark."""

from __future__ import annotations

import datetime
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent.parent / "benchmarks" / "results" / "history.jsonl"
MARKER = "<!-- pictures -->"
"""Where the pictures go in the page."""


def by_benchmark(lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the measurements of each benchmark, in order of their dates."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        measured = json.loads(line)
        measured["date"] = datetime.datetime.fromisoformat(measured["date"])
        found[measured["benchmark"]].append(measured)
    return {name: sorted(found[name], key=lambda measured: measured["date"]) for name in sorted(found)}


def picture(measurements: Sequence[dict[str, Any]]) -> bytes:
    """Draws ratios over dates as SVG, with their spreads: a line for each row on each machine."""
    import matplotlib
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for measured in measurements:
        where = measured["machine"] if measured["device"] == "CPU" else measured["device"]
        rows[measured["row"], where].append(measured)
    figure = Figure(figsize=(7.2, 3 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for index, ((row, where), points) in enumerate(rows.items()):
        ratios = [point["ratio"] for point in points]
        spread = [
            [ratio - point["spread"][0] for ratio, point in zip(ratios, points, strict=True)],
            [point["spread"][1] - ratio for ratio, point in zip(ratios, points, strict=True)],
        ]
        axes.errorbar(
            [point["date"] for point in points],
            ratios,
            yerr=spread,
            marker="osD^v"[index // 10 % 5],
            markersize=4,
            capsize=3,
            linewidth=1,
            label=f"{row} ({where})",
        )
    axes.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
    dates = [measured["date"] for measured in measurements]
    day = datetime.timedelta(days=1)
    axes.set_xlim(min(dates) - day, max(dates) + day)
    locator = AutoDateLocator(minticks=2, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set(xlabel="date (UTC)", ylabel="ratio to what it is compared with")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "history", "svg.fonttype": "none"}):  # the same lines, the same file
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def section(name: str, measurements: Sequence[dict[str, Any]]) -> str:
    """Returns a benchmark's heading, picture and latest figures as Markdown."""
    latest = {(measured["row"], measured["machine"], measured["device"]): measured for measured in measurements}
    table = [
        f"| {row} | {found['ratio']:.3f} | {found['spread'][0]:.3f} to {found['spread'][1]:.3f} | {found['rounds']} "
        f"| {found['date']:%Y-%m-%d} | `{(found['commit'] or 'unknown')[:8]}` | {found['torch']} |"
        for (row, _, _), found in latest.items()
    ]
    head = "| row | ratio | spread | rounds | date | commit | torch |\n| --- | ---: | --- | ---: | --- | --- | --- |"
    return "\n".join([f"## {name}\n", f"![Ratios of {name} over dates](history/{name}.svg)\n", head, *table, ""])
