"""What is written of a run: a progress bar, ``log.jsonl``, TensorBoard, pictures of model and loss. One rank writes.

A line of ``log.jsonl`` has ``step``, and either the numbers of training since the line before (``loss`` is their mean,
in nats a token; ``memory_bytes`` the most that this rank has held) or ``validation_loss``. A resumed run goes on in
the same file, from which lines after its checkpoint are removed first: every step stands there once.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .. import device
from ..distributed import _BaseDataParallel
from ..errors import CheckpointError, MissingExtraError
from .config import PretrainConfig
from .train_step import StepResult

LOG_FILE = "log.jsonl"
CURVE_FILE = "loss.png"
MODEL_FILE = "model.html"
_NO_LOG = "{} is not the log of a run; move it away, or choose another --save"
_TTY_INTERVAL_S = 0.2
_PIPE_INTERVAL_S = 10.0


class RunLog:
    """The log of a run that starts, or goes on, at `iteration`.

    Args:
        folder: of ``log.jsonl``, ``config.json``, ``model.html`` and ``loss.png``; None writes no files.
        enabled: False on ranks that write nothing.

    Raises:
        MissingExtraError: tqdm, matplotlib, or TensorBoard where it was asked for, is not installed.
    """

    def __init__(self, config: PretrainConfig, folder: Path | None, iteration: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self._folder = folder if enabled else None
        self._log_interval, self._last = config.run.log_interval, config.run.train_iters
        self._losses: list[float] = []
        self._num_tokens, self._seconds, self._skipped = 0, 0.0, 0
        self._file: Any = None
        self._bar: Any = None
        self._tensorboard: Any = None
        if not enabled:
            return
        self._bar = _progress_bar(config.run.train_iters, iteration)
        if self._folder is not None:
            _figure_class()  # found missing now, not after the training
            self._folder.mkdir(parents=True, exist_ok=True)
            settings = json.dumps(config.to_json(), indent=1)
            (self._folder / "config.json").write_text(settings, encoding="utf-8")
            _drop_lines_after(self._folder / LOG_FILE, iteration)
            self._file = (self._folder / LOG_FILE).open("a", encoding="utf-8")
        if config.run.tensorboard_dir is not None:
            self._tensorboard = _tensorboard_writer(config.run.tensorboard_dir, iteration)

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
            (self._folder / MODEL_FILE).write_text(page, encoding="utf-8")

    def validation(self, iteration: int, loss: float) -> None:
        """Writes the loss of a validation."""
        if self.enabled:
            self._write({"step": iteration, "validation_loss": loss})
            self.message(f"iteration {iteration}: validation loss {loss:.4f}")

    def message(self, text: str) -> None:
        """Shows a line above the progress bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends bar and files, and draws the loss curve of the whole run, earlier parts included."""
        if not self.enabled:
            return
        self._bar.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._folder is not None:
            self._file.close()
            if kind is None:  # else what went wrong comes first
                draw_loss_curve(self._folder / LOG_FILE, self._folder / CURVE_FILE)

    def _show(self, result: StepResult, lr: float, tokens_per_s: float, memory: int) -> None:
        norm = f"{result.grad_norm:.2f}" if result.updated and result.grad_norm is not None else "skipped"
        shown = {"loss": f"{result.loss:.3f}", "lr": f"{lr:.2e}", "grad": norm}
        shown |= {"tok/s": f"{tokens_per_s:,.0f}", "mem": f"{memory / 2**20:,.0f}M"}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: a number that is not finite becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        if self._file is not None:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in finite.items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(name, value, line["step"])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``log.jsonl``; a last one that a crash cut short is left out.

    Raises:
        CheckpointError: it is no text.
    """
    lines: list[dict[str, Any]] = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError:
        raise CheckpointError(_NO_LOG.format(path)) from None
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


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


def _drop_lines_after(path: Path, iteration: int) -> None:
    """Removes what a run that is resumed, or begun anew, will write again."""
    if not path.exists():
        return
    try:
        kept = [line for line in read_log(path) if line["step"] <= iteration]
    except (KeyError, TypeError):
        raise CheckpointError(_NO_LOG.format(path)) from None
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    draft.replace(path)


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        """Seconds, never zero, and starts again."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        return seconds
