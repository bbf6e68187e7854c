"""Reads ``log.jsonl``, truncates it where a resumed run continues, and writes files that a run does not depend on.

A line of ``log.jsonl`` has ``step``, and either figures of training since the line before (``loss`` is the mean, in
nats per token; ``memory_bytes`` this rank's peak) or ``validation_loss``. A resumed run removes the lines after its
checkpoint and continues the file, so that it has every step once.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..base import device
from ..base.errors import CheckpointError, import_extra
from ..base.files import BoundsError, parse_json

LOG_FILE = "log.jsonl"
_CURVE = "The loss curve"
_NO_LOG = "{} is not the log of a run; move it away, or choose another --save"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a ``log.jsonl``, without a last one that a crash truncated.

    Raises:
        CheckpointError: the file is no text.
    """
    return [line for line, _ in _lines_and_ends(path)]


def _lines_and_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the complete lines of a log, each with the byte at which it ends."""
    end = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                end += len(raw)
                text = raw.decode("utf-8")
                try:
                    line = parse_json(text)
                except BoundsError:
                    return
                yield line, end
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(_NO_LOG.format(path)) from None


def drop_lines_after(path: Path, iteration: int) -> int:
    """Truncates the log after a step, because a resumed or new run writes later lines again. Returns its new length.

    Steps are in order, so that truncation suffices; it works on a full disk.
    """
    if not path.exists():
        return 0
    end_of_kept = 0
    try:
        for line, end in _lines_and_ends(path):
            if line["step"] > iteration:
                break
            end_of_kept = end
    except (KeyError, TypeError):
        raise CheckpointError(_NO_LOG.format(path)) from None
    os.truncate(path, end_of_kept)
    return end_of_kept


def peak_memory_bytes() -> int:
    """Returns this rank's peak memory in bytes: of the GPU if there is one, else of the process."""
    if device.device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()  # time of the construction or of the last `read`, which sets it

    def read(self) -> float:
        """Returns the seconds, never zero, and restarts."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        return seconds


class OptionalFiles:
    """Writes files, and retries those that could not be written.

    Args:
        say: called with one line when writing pauses, and one when all pending files are written.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[Path, Callable[[], object]] = {}
        """Functions that write the pending files, by file. `write` adds on failure, `retry` removes on success."""

    def write(self, path: Path, write: Callable[[], object]) -> None:
        """Calls `write`, which may raise OSError and be called again. `path` is named in messages."""
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
    figure = figure_class(_CURVE)(figsize=(8, 4.5), dpi=120, layout="constrained")
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


def figure_class(purpose: str) -> Any:
    """Returns matplotlib's class of figures. Raises MissingExtraError, which names `purpose`, if it is not there."""
    return import_extra("matplotlib.figure", "train", purpose).Figure
