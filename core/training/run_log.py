"""Logs a run while it goes on: progress bar, ``log.jsonl``, TensorBoard, pictures of model and loss.

A line of ``log.jsonl`` has ``step``, and either figures of training since the line before (``loss`` is the mean, in
nats per token; ``memory_bytes`` this rank's peak) or ``validation_loss``. A resumed run removes the lines after its
checkpoint and continues the file, so that it has every step once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..base import device
from ..base.errors import CheckpointError, import_extra
from ..base.files import BoundsError, make_folders, parse_json, write_durably
from ..distributed import _BaseDataParallel
from .config import PretrainConfig
from .launch.messages import Generation
from .train_step import StepResult

LOG_FILE = "log.jsonl"
CURVE_FILE = "loss.png"
MODEL_FILE = "model.html"
_MOST_LINES_WAITING = 100_000
_TTY_INTERVAL_S = 0.2
_PIPE_INTERVAL_S = 10.0
_CURVE = "The loss curve"
_NO_LOG = "{} is not the log of a run; move it away, or choose another --save"


class RunLog(AbstractContextManager["RunLog"]):
    """The log of a run that starts or continues at `iteration`.

    Args:
        folder: folder of ``log.jsonl``, ``config.json``, ``model.html`` and ``loss.png``; None writes no files.
        enabled: False on ranks that write nothing.

    Raises:
        MissingExtraError: tqdm, matplotlib, or the requested TensorBoard is not installed.
        CheckpointError: the folder has another file of such a name.
    """

    def __init__(self, config: PretrainConfig, folder: Path | None, iteration: int, *, is_writer: bool) -> None:
        self.is_writer = is_writer
        self._folder = folder if is_writer else None
        self._log_interval, self._last = config.run.log_interval, config.run.train_iters
        self._losses: list[float] = []
        """Losses since the last line of training. `step` appends, and clears it when it writes a line."""
        self._num_tokens, self._seconds, self._num_skipped = 0, 0.0, 0
        """Sums since the last line of training, as `_losses`. `step` adds to them, and clears them when it writes
        one."""
        self._lines: deque[str] = deque(maxlen=_MOST_LINES_WAITING)
        """Lines that are not in the file yet. `_write` adds, and `_write_lines` clears it once they are written."""
        self._log_bytes = 0
        """Length of the file up to its last complete line. A partial line after it is overwritten. `_write_lines`
        advances it."""
        self._bar: Any = None
        """The progress bar, from here until the log is left. None on ranks that write nothing."""
        self._tensorboard: Any = None
        """TensorBoard's writer. None if it was not requested, and while its folder cannot be written. `_write_scalars`
        opens it, and drops it after an error."""
        self._tensorboard_dir = config.run.tensorboard_dir if is_writer else None
        self.files = OptionalFiles(self.message)
        """Writes the files, and keeps those pending that could not be written."""
        if not is_writer:
            return
        settings = None
        if self._folder is not None:
            import_extra("matplotlib.figure", "train", _CURVE)  # raise now if it is missing, not after the training
            make_folders(self._folder)
            self._log_bytes = drop_lines_after(self._folder / LOG_FILE, iteration)
            settings = self._folder / "config.json"
            if settings.is_dir():
                raise CheckpointError(f"{settings} is a folder, and a run's settings are written there; move it away")
        self._bar = _progress_bar(config.run.train_iters, iteration)
        if settings is not None:
            self.files.write(settings, partial(write_durably, settings, json.dumps(config.to_json(), indent=1)))
        if self._tensorboard_dir is not None:
            self._tensorboard = _tensorboard_writer(self._tensorboard_dir, iteration)

    def step(
        self, iteration: int, result: StepResult, *, num_tokens: int, seconds: float, weights_hash: str | None = None
    ) -> None:
        """Records one iteration of `num_tokens` tokens over all ranks. Writes a line if one is due.

        Args:
            weights_hash: of the weights after it, which has a line in any case; None where no hash is due.
        """
        if not self.is_writer:
            return
        self._losses.append(result.loss)
        self._num_tokens += num_tokens
        self._seconds += seconds
        self._num_skipped += not result.has_update
        memory = _peak_memory_bytes()
        self._show(result, num_tokens / seconds, memory)
        hash_entry = {} if weights_hash is None else {"weights_hash": weights_hash}
        if hash_entry:
            self.message(f"iteration {iteration}: weights {weights_hash}")
        if iteration % self._log_interval and iteration != self._last:
            if hash_entry:
                self._write({"step": iteration, **hash_entry})
            return
        self._write(
            {
                "step": iteration,
                "loss": sum(self._losses) / len(self._losses),
                "lr": result.lr,
                "grad_norm": result.grad_norm,
                "tokens_per_s": self._num_tokens / self._seconds,
                "num_zeros": result.num_zeros,
                "loss_scale": result.loss_scale,
                "skipped": self._num_skipped,
                "memory_bytes": memory,
                **result.experts,
                **hash_entry,
            }
        )
        self._losses, self._num_tokens, self._seconds, self._num_skipped = [], 0, 0.0, 0

    def model(self, model: _BaseDataParallel, num_microbatches: int) -> None:
        """Shows the description of the wrapped model, and writes it as a page, ``model.html``."""
        if not self.is_writer:
            return
        self.message(model.describe(num_microbatches=num_microbatches))
        if self._folder is not None:
            page = model.describe("html", num_microbatches)
            target = self._folder / MODEL_FILE
            self.files.write(target, partial(target.write_text, page, encoding="utf-8"))

    def validation(self, iteration: int, loss: float) -> None:
        """Writes the loss of a validation."""
        if self.is_writer:
            self._write({"step": iteration, "validation_loss": loss})
            self.message(f"iteration {iteration}: validation loss {loss:.4f}")

    def lost_rank(self, iteration: int, generation: Generation, seconds: float) -> None:
        """Writes which rank was lost before the step that ends here, and the seconds from its loss to now."""
        if self.is_writer:
            ranks = generation.world_size
            self._write({"step": iteration, "lost": generation.lost, "recovery_s": seconds, "ranks": ranks})
            self.message(f"iteration {iteration}: {generation.lost}; {seconds:.1f} s later on {ranks} ranks")

    def message(self, text: str) -> None:
        """Shows a line above the progress bar."""
        if self._bar is not None:
            with suppress(OSError):  # the output may be a file on a full disk
                self._bar.write(text, file=sys.stderr)

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes bar and files, and draws the loss curve of the whole run, earlier parts included."""
        if not self.is_writer:
            return
        with suppress(OSError):
            self._bar.close()
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.close()
        if self._folder is not None and kind is None:  # after an error, leave its message as the last one
            log, curve = self._folder / LOG_FILE, self._folder / CURVE_FILE
            self.files.write(curve, lambda: draw_loss_curve(log, curve))
        self.files.retry()
        if self.files.waiting:
            self.message(f"warning: not written: {', '.join(map(str, self.files.waiting))}")

    def _show(self, result: StepResult, tokens_per_s: float, memory: int) -> None:
        norm = f"{result.grad_norm:.2f}" if result.has_update and result.grad_norm is not None else "skipped"
        texts = {"loss": f"{result.loss:.3f}", "lr": f"{result.lr:.2e}", "grad": norm}
        texts |= {"tok/s": f"{tokens_per_s:,.0f}", "mem": f"{memory / 2**20:,.0f}M"}
        with suppress(OSError):
            self._bar.set_postfix(texts, refresh=False)
            self._bar.update(1)

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: a number that is not finite becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        if self._folder is not None:
            self._lines.append(json.dumps(finite) + "\n")
            self.files.write(self._folder / LOG_FILE, self._write_lines)
        if self._tensorboard_dir is not None:
            self.files.write(self._tensorboard_dir, partial(self._write_scalars, self._tensorboard_dir, finite))
        self.files.retry()

    def _write_lines(self) -> None:
        """Appends all pending lines. Overwrites a line that a full disk truncated."""
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
        """Writes a line to TensorBoard. Creates a new writer after an error, which the old one does not survive."""
        try:
            if self._tensorboard is None:
                self._tensorboard = _tensorboard_writer(folder, line["step"] - 1)
            for name, value in line.items():
                if name != "step" and value is not None and not isinstance(value, str):
                    self._tensorboard.add_scalar(name, value, line["step"])
        except OSError:
            self._tensorboard = None
            raise


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


def draw_loss_curve(log: Path, picture: Path) -> None:
    """Draws training and validation loss over the iterations of a log.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = read_log(log)
    figure = import_extra("matplotlib.figure", "train", _CURVE).Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, label, marker in (("loss", "training", ""), ("validation_loss", "validation", "o")):
        if points := [(line["step"], line[name]) for line in lines if line.get(name) is not None]:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture)


def _progress_bar(total: int, initial: int) -> Any:
    tqdm = import_extra("tqdm", "train", "The progress bar").tqdm
    interval = _TTY_INTERVAL_S if sys.stderr.isatty() else _PIPE_INTERVAL_S
    return tqdm(total=total, initial=initial, desc="training", unit="step", mininterval=interval, dynamic_ncols=True)


def _tensorboard_writer(folder: Path, iteration: int) -> Any:
    import_extra("tensorboard", "train", "--tensorboard-dir")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=iteration + 1)


def _peak_memory_bytes() -> int:
    """Returns this rank's peak memory in bytes: of the GPU if there is one, else of the process."""
    if device.device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
