"""Writes files that a run does not depend on: logs, pages, plots. On a full disk they are retried, and training goes
on. Also draws the loss curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .log_file import read_log


class OptionalFiles:
    """Writes files, and retries those that could not be written.

    Args:
        say: called with one line when writing pauses, and one when all pending files are written.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[Path, Callable[[], None]] = {}
        """Functions that write the pending files, by file. `write` adds on failure, `retry` removes on success."""

    def write(self, path: Path, write: Callable[[], None]) -> None:
        """Calls `write`, which may raise OSError and be called again; `path` is named in messages."""
        try:
            write()
        except OSError as error:
            if not self._waiting:
                self._say(
                    f"warning: {path} cannot be written ({error.strerror or error}): logs, pages and plots pause, and "
                    "training goes on"
                )
            self._waiting[path] = write
        else:
            if self._waiting.pop(path, None) is not None and not self._waiting:
                self._say("logs, pages and plots are written again")

    def retry(self) -> None:
        """Writes the pending files again."""
        for path, write in list(self._waiting.items()):
            self.write(path, write)

    @property
    def waiting(self) -> list[Path]:
        """The pending files."""
        return list(self._waiting)


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
