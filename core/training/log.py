"""What is written of a run: a progress bar, ``log.jsonl``, TensorBoard, pictures of model and loss. One rank writes.

A line of ``log.jsonl`` has ``step``, and either the numbers of training since the line before (``loss`` is their mean,
in nats a token; ``memory_bytes`` the most that this rank has held) or ``validation_loss``. A resumed run goes on in
the same file, from which lines after its checkpoint are removed first: every step stands there once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .. import device
from ..bounds import BoundsError, parse_json
from ..distributed import _BaseDataParallel
from ..durable import make_folders, write_durably
from ..errors import CheckpointError, MissingExtraError
from .config import PretrainConfig
from .patience import Patience
from .train_step import StepResult

LOG_FILE = "log.jsonl"
CURVE_FILE = "loss.png"
MODEL_FILE = "model.html"
_NO_LOG = "{} is not the log of a run; move it away, or choose another --save"
_MOST_LINES_WAITING = 100_000
_TTY_INTERVAL_S = 0.2
_PIPE_INTERVAL_S = 10.0


class RunLog:
    """The log of a run that starts, or goes on, at `iteration`.

    Args:
        folder: of ``log.jsonl``, ``config.json``, ``model.html`` and ``loss.png``; None writes no files.
        enabled: False on ranks that write nothing.

    Raises:
        MissingExtraError: tqdm, matplotlib, or TensorBoard where it was asked for, is not installed.
        CheckpointError: the folder holds another file of such a name.
    """

    def __init__(self, config: PretrainConfig, folder: Path | None, iteration: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self._folder = folder if enabled else None
        self._log_interval, self._last = config.run.log_interval, config.run.train_iters
        self._losses: list[float] = []
        self._num_tokens, self._seconds, self._skipped = 0, 0.0, 0
        self._lines: deque[str] = deque(maxlen=_MOST_LINES_WAITING)
        """Lines of the log that are not in the file yet, because it could not be written."""
        self._log_bytes = 0
        """Length of the file up to the last whole line that this run knows of."""
        self._bar: Any = None
        self._tensorboard: Any = None
        """None also while TensorBoard's folder cannot be written."""
        self._tensorboard_dir = config.run.tensorboard_dir if enabled else None
        self.patience = Patience(self.message)
        """Writes what the run can do without for a while."""
        if not enabled:
            return
        settings = None
        if self._folder is not None:
            _figure_class()  # found missing now, not after the training
            make_folders(self._folder)
            self._log_bytes = _drop_lines_after(self._folder / LOG_FILE, iteration)
            settings = self._folder / "config.json"
            if settings.is_dir():
                raise CheckpointError(f"{settings} is a folder, and a run's settings are written there; move it away")
        self._bar = _progress_bar(config.run.train_iters, iteration)
        if settings is not None:
            self.patience.write(settings, partial(write_durably, settings, json.dumps(config.to_json(), indent=1)))
        if self._tensorboard_dir is not None:
            self._tensorboard = _tensorboard_writer(self._tensorboard_dir, iteration)

    def step(
        self, iteration: int, result: StepResult, *, lr: float, loss_scale: float, num_tokens: int, seconds: float
    ) -> None:
        """Notes one iteration of `num_tokens` tokens over all ranks; writes a line when one is due."""
        if not self.enabled:
            return
        self._losses.append(result.loss)
        self._num_tokens += num_tokens
        self._seconds += seconds
        self._skipped += not result.updated
        memory = peak_memory_bytes()
        self._show(result, lr, num_tokens / seconds, memory)
        if iteration % self._log_interval and iteration != self._last:
            return
        self._write(
            {
                "step": iteration,
                "loss": sum(self._losses) / len(self._losses),
                "lr": lr,
                "grad_norm": result.grad_norm,
                "tokens_per_s": self._num_tokens / self._seconds,
                "num_zeros": result.num_zeros,
                "loss_scale": loss_scale,
                "skipped": self._skipped,
                "memory_bytes": memory,
            }
        )
        self._losses, self._num_tokens, self._seconds, self._skipped = [], 0, 0.0, 0

    def model(self, model: _BaseDataParallel, num_microbatches: int) -> None:
        """Shows what the wrapper made of the model, and writes it as a page, ``model.html``."""
        if not self.enabled:
            return
        self.message(model.describe(num_microbatches=num_microbatches))
        if self._folder is not None:
            page = model.describe("html", num_microbatches)
            target = self._folder / MODEL_FILE
            self.patience.write(target, lambda: _write_text(target, page))

    def validation(self, iteration: int, loss: float) -> None:
        """Writes the loss of a validation."""
        if self.enabled:
            self._write({"step": iteration, "validation_loss": loss})
            self.message(f"iteration {iteration}: validation loss {loss:.4f}")

    def message(self, text: str) -> None:
        """Shows a line above the progress bar."""
        if self._bar is not None:
            with suppress(OSError):  # it goes into a file, on a disk that is full
                self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends bar and files, and draws the loss curve of the whole run, earlier parts included."""
        if not self.enabled:
            return
        with suppress(OSError):
            self._bar.close()
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.close()
        if self._folder is not None and kind is None:  # else what went wrong comes first
            log, curve = self._folder / LOG_FILE, self._folder / CURVE_FILE
            self.patience.write(curve, lambda: draw_loss_curve(log, curve))
        self.patience.retry()
        if self.patience.waiting:
            self.message(f"warning: not written: {', '.join(map(str, self.patience.waiting))}")

    def _show(self, result: StepResult, lr: float, tokens_per_s: float, memory: int) -> None:
        norm = f"{result.grad_norm:.2f}" if result.updated and result.grad_norm is not None else "skipped"
        shown = {"loss": f"{result.loss:.3f}", "lr": f"{lr:.2e}", "grad": norm}
        shown |= {"tok/s": f"{tokens_per_s:,.0f}", "mem": f"{memory / 2**20:,.0f}M"}
        with suppress(OSError):
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(1)

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: a number that is not finite becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        if self._folder is not None:
            self._lines.append(json.dumps(finite) + "\n")
            self.patience.write(self._folder / LOG_FILE, self._write_lines)
        if self._tensorboard_dir is not None:
            self.patience.write(self._tensorboard_dir, partial(self._write_scalars, self._tensorboard_dir, finite))
        self.patience.retry()

    def _write_lines(self) -> None:
        """Appends all lines that wait; what a full disk cut short is written again as a whole."""
        if self._folder is None or not self._lines:
            return
        data = "".join(self._lines).encode()
        with (self._folder / LOG_FILE).open("ab", buffering=0) as file:
            file.truncate(self._log_bytes)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._log_bytes += len(data)
        self._lines.clear()

    def _write_scalars(self, folder: Path, line: dict[str, Any]) -> None:
        """Gives TensorBoard a line; its writer does not outlive an error, so that one is made anew."""
        try:
            if self._tensorboard is None:
                self._tensorboard = _tensorboard_writer(folder, line["step"] - 1)
            for name, value in line.items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, line["step"])
        except OSError:
            self._tensorboard = None
            raise


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``log.jsonl``; a last one that a crash cut short is left out.

    Raises:
        CheckpointError: it is no text.
    """
    return [line for line, _ in _lines_and_ends(path)]


def _lines_and_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines of a log, each with the byte at which it ends."""
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


def draw_loss_curve(log: Path, picture: Path) -> None:
    """Draws training and validation loss over the iterations of a log.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    figure = _figure_class()(figsize=(8, 4.5), dpi=120, layout="constrained")
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


def peak_memory_bytes() -> int:
    """The most memory that this rank has held: of the GPU where there is one, else of the process."""
    if device.device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _progress_bar(total: int, initial: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise MissingExtraError("tqdm", "train", "The progress bar") from None
    interval = _TTY_INTERVAL_S if sys.stderr.isatty() else _PIPE_INTERVAL_S
    return tqdm(total=total, initial=initial, desc="training", unit="step", mininterval=interval, dynamic_ncols=True)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "The loss curve") from None
    return Figure


def _tensorboard_writer(folder: Path, iteration: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "train", "--tensorboard-dir") from None
    return SummaryWriter(str(folder), purge_step=iteration + 1)


def _drop_lines_after(path: Path, iteration: int) -> int:
    """Removes what a run that is resumed, or begun anew, will write again; returns the length of what is left.

    The file is cut, which takes no room: steps follow one another in it.
    """
    if not path.exists():
        return 0
    kept = 0
    try:
        for line, end in _lines_and_ends(path):
            if line["step"] > iteration:
                break
            kept = end
    except (KeyError, TypeError):
        raise CheckpointError(_NO_LOG.format(path)) from None
    os.truncate(path, kept)
    return kept


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        """Seconds, never zero, and starts again."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        return seconds
