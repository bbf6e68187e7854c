"""The memory of a step as a series, by category: what `memory_profile` measures, written and drawn."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError

PICTURE_FILE, SERIES_FILE = "memory.png", "memory.json"

CATEGORIES = ("parameters", "gathered parameters", "gradients", "optimizer state", "activations and other")
"""From the bottom of the picture to its top. Parameters are this rank's shards, or whole without sharding."""

MAX_POINTS = 2000
"""Most points of a series; of moments that are closer together, the one with the most memory is kept."""

_COLORS = ("#3b76c9", "#8fb8ec", "#d9822b", "#8256c4", "#9aa5b1")


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of each category on this rank at moments of a step."""

    device: str
    times_s: tuple[float, ...]
    """Seconds since the step began."""
    held: tuple[tuple[int, ...], ...]
    """Bytes of each of `CATEGORIES`, per moment."""

    @property
    def peak(self) -> int:
        """Index of the moment with the most memory."""
        return max(range(len(self.held)), key=lambda index: sum(self.held[index]))

    @property
    def peak_bytes(self) -> int:
        """Bytes of all categories at the peak."""
        return sum(self.held[self.peak])

    def thinned(self, num_points: int = MAX_POINTS) -> MemoryTimeline:
        """Returns at most `num_points` moments, each the one with the most memory of its neighbourhood."""
        if len(self.held) <= num_points:
            return self
        cuts = [len(self.held) * i // num_points for i in range(num_points + 1)]
        kept = [
            max(range(start, end), key=lambda index: sum(self.held[index])) for start, end in itertools.pairwise(cuts)
        ]
        return MemoryTimeline(self.device, tuple(self.times_s[i] for i in kept), tuple(self.held[i] for i in kept))

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; the series is thinned and contains the peak."""
        series = self.thinned()
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "peak_at_s": self.times_s[self.peak],
            "bytes_at_peak": dict(zip(CATEGORIES, self.held[self.peak], strict=True)),
            "time_s": list(series.times_s),
            "bytes": {name: [held[i] for held in series.held] for i, name in enumerate(CATEGORIES)},
        }


def write_timeline(timeline: MemoryTimeline, folder: Path, iteration: int) -> None:
    """Writes the picture and the series of a step into a run's folder.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    values = json.dumps({"iteration": iteration, **timeline.to_json()})
    (folder / SERIES_FILE).write_text(values, encoding="utf-8")
    draw(timeline, folder / PICTURE_FILE, f"iteration {iteration}, rank 0, {timeline.device}")


def draw(timeline: MemoryTimeline, picture: Path, title: str) -> None:
    """Draws the categories as stacked areas over the time of the step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "The picture of memory") from None
    series = timeline.thinned()
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    layers = [[held[i] / 2**20 for held in series.held] for i in range(len(CATEGORIES))]
    axes.stackplot(series.times_s, layers, labels=CATEGORIES, colors=_COLORS, step="post", linewidth=0)
    peak = timeline.peak_bytes / 2**20
    axes.axhline(peak, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"peak {peak:,.1f} MiB", (series.times_s[-1], peak), ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="time in the step (s)", ylabel="memory (MiB)", title=title, ylim=(0, 1.25 * peak))
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, ncols=2)
    figure.savefig(picture)
