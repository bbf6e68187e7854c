"""Draws a run's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .log_file import read_log


def draw_loss_curve(log: Path, picture: Path) -> None:
    """Draws training and validation loss over the iterations of a log.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    figure = figure_class()(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, label, marker in (("loss", "training", ""), ("validation_loss", "validation", "o")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture)


def figure_class() -> Any:
    """Returns matplotlib's class of figures; raises MissingExtraError if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "The loss curve") from None
    return Figure
