"""Draws plans as SVG for a page: memory and queues over a step, bytes on the wire, and throughput over ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import numpy as np

from ..base.errors import import_extra
from ..base.text import readable_bytes
from ..training.memory_profile import MemoryTimeline
from .estimates import Estimate
from .recorder import Mark
from .search import Scaling
from .simulation import CATEGORIES
from .step_time import drawn_times

_COLORS = ("#3b76c9", "#8fb8ec", "#d9822b", "#8256c4", "#9aa5b1", "#2c9a6b", "#c4566f")


def picture(draw: Callable[[Any, Sequence[Any]], None], inches: float, values: Sequence[Any]) -> str:
    """Returns what a function of this file draws of plans as an SVG element of a page, whose text color it has.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figures = import_extra("matplotlib.figure", "train", "The planner's page")
    style = {"svg.fonttype": "none", "svg.hashsalt": draw.__name__, "legend.frameon": False, "font.size": 9}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with import_extra("matplotlib", "train", "The planner's page").rc_context(style):
        figure, file = figures.Figure(figsize=(10, inches), layout="constrained"), StringIO()
        draw(figure, values)
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, dpi=200, metadata=no_metadata)
    # Groups of all figures have the same ids, which none of them refers to.
    svg = re.sub(r'<g id="[^"]*"', "<g", file.getvalue().partition("<svg")[2].replace("#000000", "currentColor"))
    return f"<svg{svg}"


def draw_steps(figure: Any, estimates: Sequence[Estimate]) -> None:
    """Draws for each wrapper the memory of a rank, in GiB, and below it what is in its queues, over milliseconds."""
    rows = figure.subplots(2 * len(estimates), sharex=True, height_ratios=[3, 1] * len(estimates))
    for estimate, memory, queues in zip(estimates, rows[::2], rows[1::2], strict=True):
        _draw_step(estimate, memory, queues)
        memory.set(ylabel="memory (GiB)", ylim=(0, 1.1 * max(each.peak_bytes for each in estimates) / 2**30))
    entries = dict(zip(*map(reversed, rows[0].get_legend_handles_labels()), strict=True))
    figure.legend([*entries], [*entries.values()], loc="outside upper center", ncols=4)


def _draw_step(estimate: Estimate, memory: Any, queues: Any) -> None:
    simulation = estimate.simulation
    ends, spans = drawn_times(simulation, estimate.hardware)
    times = np.array([0.0, *ends])[[moment.num_events for moment in simulation.timeline]]
    series = MemoryTimeline("", 1e3 * times, np.array([moment.held for moment in simulation.timeline])).thin()
    layers = series.category_bytes.T / 2**30
    # As pixels: thousands of points would be larger.
    memory.stackplot(series.times_s, layers, labels=CATEGORIES, colors=_COLORS, step="post", lw=0, rasterized=True)
    memory.plot(series.times_s[series.peak], estimate.peak_bytes / 2**30, "v", color="black", clip_on=False)
    drawn = {event.micro_batch for _, event in simulation.drawn_events if isinstance(event, Mark)}
    left_out = simulation.num_microbatches - len(drawn)
    note = f", without {left_out} micro-batches that are like the second" if left_out else ""
    memory.set_title(estimate.wrapper, loc="left", fontweight="bold")
    memory.set_title(f"▾ peak {readable_bytes(estimate.peak_bytes)}: {simulation.peak.where}", loc="right")
    for index, (entries, color) in enumerate(zip(spans.values(), itertools.cycle(_COLORS), strict=False)):
        queues.broken_barh(1e3 * np.array(entries), (index - 0.4, 0.8), color=color, rasterized=True)
    queues.set_yticks(range(len(spans)), [*spans])
    queues.invert_yaxis()
    queues.set(xlabel=f"time in the step (ms){note}")
    queues.tick_params(labelbottom=True)


def draw_wire(figure: Any, estimates: Sequence[Estimate]) -> None:
    """Draws the bytes that a rank sends to others in a step under each wrapper, in GiB: in its node and out of it."""
    axes, names = figure.subplots(), [estimate.wrapper for estimate in estimates]
    crossing, total = (
        np.array([sum(getattr(entry, kind) for entry in e.wire if entry.ranks > 1) for e in estimates]) / 2**30
        for kind in ("crossing_bytes", "sent_bytes")
    )
    axes.barh(names, total - crossing, 0.6, label="stay in the node", color=_COLORS[0])
    axes.barh(names, crossing, 0.6, total - crossing, label="leave the node", color=_COLORS[2])
    axes.invert_yaxis()
    axes.set(xlabel="sent by a rank in a step (GiB)")
    figure.legend(loc="outside upper center", ncols=2)


def draw_throughput(figure: Any, sweep: Sequence[Scaling]) -> None:
    """Draws the tokens a second of a rank over numbers of ranks, a line for each wrapper."""
    axes = figure.subplots()
    for scaling in sweep:
        style = "--" if scaling.name.startswith("hybrid") else "-"
        ranks = [point.world_size for point in scaling.points]
        axes.plot(ranks, [point.tokens_per_second for point in scaling.points], style, label=scaling.name)
    ticks = sorted({point.world_size for scaling in sweep for point in scaling.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{number:,}" for number in ticks])
    axes.set(xlabel="ranks", ylabel="tokens/s of a rank", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4)
