"""The file ``log.jsonl``, the loss curve, and files that wait while a disk is full."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, import_extra
from ..base.files import BoundsError, parse_json

LOG_FILE = "log.jsonl"
CURVE_FILE = "loss.png"
CURVE = "The loss curve"
_MOST_LINES_WAITING = 100_000
_NO_LOG = "{} is not the log of a run; move it away, or choose another folder"


class LinesFile:
    """Appends lines of JSON to a file, whole or not at all.

    Args:
        first: what `begin` is called with at once; None leaves that to the first step.
        say: called with one line when lines are removed.

    Raises:
        CheckpointError: the file is not the log of a run.
    """

    def __init__(self, path: Path, first: int | None, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._lines: deque[str] = deque(maxlen=_MOST_LINES_WAITING)
        """Lines that are not in the file yet. `add` adds, and `write` clears it once they are written."""
        self._steps_and_ends = _steps_and_ends(path)
        """Of the lines of earlier runs. `begin` clears it."""
        self._num_bytes = self._steps_and_ends[-1][1] if self._steps_and_ends else 0
        """Length of the file up to its last complete line. What is after it is overwritten. `write` advances it."""
        if first is not None:
            self.begin(first)

    def begin(self, first: int) -> None:
        """Removes lines of earlier runs from a step on, because this run writes them again. Later calls do nothing.

        Steps are in order, so that `write` truncates the file, which works on a full disk.
        """
        kept = [end for step, end in self._steps_and_ends if step < first]
        if removed := len(self._steps_and_ends) - len(kept):
            self._num_bytes = kept[-1] if kept else 0
            lines = f"{removed} line{'s' * (removed > 1)}"
            self._say(f"{self.path}: {lines} of an earlier run removed, from step {first} on")
        self._steps_and_ends = []

    def add(self, line: dict[str, Any]) -> None:
        """Keeps a line for `write`."""
        self._lines.append(json.dumps(line) + "\n")

    def write(self) -> None:
        """Appends all pending lines. Overwrites a line that a full disk truncated.

        Raises:
            OSError: they cannot be written; call it again later.
        """
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        with self.path.open("ab", buffering=0) as file:
            file.truncate(self._num_bytes)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._num_bytes += len(data)
        self._lines.clear()


class OptionalFiles:
    """Writes files, and retries those that could not be written.

    Args:
        say: called with one line when writing pauses, and one when all pending files are written.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[Path | str, Callable[[], object]] = {}
        """Functions that write the pending files, by file. `write` adds on failure, `retry` removes on success."""

    def write(self, path: Path | str, write: Callable[[], object]) -> None:
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
    def waiting(self) -> list[Path | str]:
        """The pending files."""
        return list(self._waiting)


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
        with suppress(FileNotFoundError, BoundsError), path.open("rb") as file:
            for raw in file:
                end += len(raw)
                yield parse_json(raw.decode("utf-8")), end
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(_NO_LOG.format(path)) from None


def _steps_and_ends(path: Path) -> list[tuple[int, int]]:
    try:
        return [(int(line["step"]), end) for line, end in _lines_and_ends(path)]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(_NO_LOG.format(path)) from None


def draw_loss_curve(log: Path, picture: Path) -> None:
    """Draws training and validation loss over the steps of a log.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    figure = import_extra("matplotlib.figure", "trackers", CURVE).Figure(
        figsize=(8, 4.5), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    for name, label, marker in (("loss", "training", ""), ("validation_loss", "validation", "o")):
        if points := [(line["step"], line[name]) for line in lines if line.get(name) is not None]:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture)
