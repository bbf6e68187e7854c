"""One object that a training loop calls once a step: `RunLog`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import CheckpointError, ConfigError, import_extra
from ..base.files import make_folders, write_durably
from ..base.text import first_line
from ..dist_checkpointing.agreement import Ranks
from ..optimizer.layer_norms import LayerNorms
from .display import Display
from .figures import Figures, device_peak_flops, model_flops_per_token
from .files import CURVE, CURVE_FILE, LOG_FILE, LinesFile, OptionalFiles, draw_loss_curve
from .trackers import Tracker, open_tracker

Value = float | int | str | Tensor | None


class RunLog(AbstractContextManager["RunLog"]):
    """The log of a run, for a loop of any kind.

    Every rank makes one and calls `step`. The first rank alone writes. ::

        log = RunLog("runs/mine", steps=range(1000), trackers=["wandb"], model=model, optimizer=optimizer)
        for step in range(1000):
            ...
            log.step(step, loss, tokens=batch.numel() * world_size)
        log.close()

    A logged step has a line in ``log.jsonl``, in each tracker, and on standard error where that is no terminal; a
    terminal has a bar of at most 80 columns. The line has, where they are known:

    * ``loss``: the mean since the line before. ``lr``: the largest rate that the last update took.
    * ``step_s``: seconds of a step. ``tokens_per_s``: of all ranks. ``mfu``: the share of `peak_flops` that the
      model's operations take.
    * ``memory_bytes``: the largest peak of a rank: of torch's allocator on GPUs, else of the process in RAM.
    * ``skew`` and ``slowest_rank``: the longest time of a rank from the end of a step to the end of the first forward
      after it, divided by the mean, and whose it is. Until then no rank waits for the gradients of others.
    * ``grad_norm/LAYER``, ``update_norm/LAYER``, ``weight_norm/LAYER``: see `shardstack.optimizer.layer_norms`.
    * what `step` is given besides.

    Between logged steps nothing is sent and no device is waited for. At a logged step ranks exchange four numbers, and
    the first rank reads them from its device.

    Args:
        folder: where ``log.jsonl`` is, and what else is asked for; None writes no files.
        steps: the numbers of the loop's steps, `range(first, end)`. None: the number of steps is unknown. Lines of an
            earlier run from the first step on are removed: of `steps`, else of the first call of `step` or `log`.
        every: the steps whose number this divides are logged, and the last one.
        trackers: a name or several, ``tensorboard``, ``wandb``, ``mlflow`` or ``trackio``, or objects with the methods
            of `Tracker`.
        model: what the loop calls, or several pipeline stages, for ``skew`` and ``mfu``.
        optimizer: what makes the updates, for ``lr`` and norms.
        tokens_per_step: over all ranks, unless `step` is given them.
        flops_per_token: the model's operations, by default 6 times its parameters. Give it for a model with experts.
        peak_flops: of one device; by default a datasheet's, if it is known.
        layer_norms: measure the norms of each layer in logged steps.
        average_loss: whether losses of ranks are averaged, or are equal already.
        curve: draw ``loss.png`` at the end.
        settings: of the run, written to ``config.json`` and handed to trackers.

    Raises:
        ConfigError, MissingExtraError, CheckpointError: on all ranks: an argument out of its range, a tracker that
            does not start or whose package is missing, or a folder that has another file of such a name.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        steps: range | None = None,
        every: int = 10,
        trackers: str | Sequence[str | Tracker] = (),
        model: nn.Module | Sequence[nn.Module] = (),
        optimizer: Optimizer | None = None,
        tokens_per_step: int = 0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        layer_norms: bool = False,
        average_loss: bool = True,
        curve: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        ranks, chunks = Ranks(error=ConfigError), list(model) if isinstance(model, Sequence) else [model]
        ranks.on_all(partial(_check, steps, every, chunks, optimizer, layer_norms))
        self.is_writer = ranks.is_first
        self.folder = Path(folder) if folder is not None and self.is_writer else None
        self._every, self._steps, self._curve, self._tokens_per_step = every, steps, curve, tokens_per_step
        self._lr: Any = None
        """Largest learning rate of the last update, None without an optimizer. A hook of its step sets it."""
        self._lines: LinesFile | None = None
        self._trackers: list[tuple[str, Tracker]] = []
        self._failed: set[str] = set()
        """Trackers that a warning has named."""
        self.files = OptionalFiles(self.message)
        """Writes the files, and keeps those pending that could not be written."""
        self._display = Display(steps[-1] if steps else None)
        ranks.on_all(partial(self._open, trackers, settings))
        self._norms = LayerNorms(optimizer, chunks) if layer_norms and optimizer is not None else None
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._note_rate)
        operations = model_flops_per_token(chunks) if flops_per_token is None and chunks else flops_per_token
        peak = peak_flops or device_peak_flops()
        share = operations / peak / ranks.size if operations and peak else None
        self._figures = Figures(chunks[0] if len(chunks) == 1 else None, averages=average_loss, flop_share=share)
        self._watch = time.perf_counter()
        """When the last step ended. `restart` sets it."""
        self._begin(steps[0] if steps else 0)

    def _open(self, trackers: str | Sequence[str | Tracker], settings: Mapping[str, Any] | None) -> None:
        """Opens files and trackers on the first rank."""
        if not self.is_writer:
            return
        first = 0 if self._steps is None else self._steps.start
        if self._curve:
            import_extra("matplotlib.figure", "trackers", CURVE)  # raise now if it is missing, not after the training
        if self.folder is not None:
            make_folders(self.folder)
            if (target := self.folder / "config.json").is_dir():
                raise CheckpointError(f"{target} is a folder, and a run's settings are written there; move it away")
            self._lines = LinesFile(self.folder / LOG_FILE, None if self._steps is None else first, self.message)
            if settings is not None:
                # JSON has no NaN, and no infinity: such a number becomes null, as in lines.
                values = json.loads(json.dumps(settings, default=str), parse_constant=lambda _: None)
                self.files.write(target, partial(write_durably, target, json.dumps(values, indent=1)))
        for tracker in [trackers] if isinstance(trackers, str) else trackers:
            name = tracker if isinstance(tracker, str) else type(tracker).__name__
            self._trackers.append((name, open_tracker(tracker, self.folder, first, settings)))

    def step(
        self,
        step: int,
        loss: float | Tensor | None = None,
        *,
        lr: float | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
        **values: Value,
    ) -> bool:
        """Records a step that was made. Every rank calls it, after the optimizer's step. Returns whether it is logged.

        Args:
            step: its number; numbers increase.
            loss: of this rank, a number or a tensor of any device, whose elements are averaged. It is not read before
                a logged step.
            lr: the learning rate; by default the optimizer's in its last step.
            tokens: of this step over all ranks; by default `tokens_per_step`.
            seconds: the time of this step; by default since the last `step` or `restart`.
            values: more numbers by name. Of a step that is not logged they are dropped.

        Raises:
            ConfigError: `step` is no whole number, or a value is neither a number nor a tensor of one element.
            OutOfStepError: not all ranks called it for a logged step.
        """
        step, loss = self._begin_line(step), _checked("loss", loss)
        values = {name: _checked(name, value, str) for name, value in values.items()}
        seconds = self.restart() if seconds is None else float(seconds)
        self._figures.add(loss, self._tokens_per_step if tokens is None else tokens, seconds)
        line: dict[str, Any] = {}
        if is_due := self._is_due(step):
            rate = _checked("lr", self._lr if lr is None else lr)
            norms = {} if self._norms is None else self._norms.take()
            values = ({} if rate is None else {"lr": rate}) | values | norms
            line = self._figures.take(values, reads=self.is_writer)
        if self.is_writer:
            if is_due:
                self._write(step, line)
            self._display.step(step, line)
        self._begin(step + 1)
        return is_due

    def log(self, step: int, **values: Value) -> None:
        """Writes and shows a line of its own, for example of a validation: ``log.log(step, validation_loss=loss)``."""
        step, line = self._begin_line(step), {name: _checked(name, value, str) for name, value in values.items()}
        if self.is_writer:
            line = {name: value.item() if isinstance(value, Tensor) else value for name, value in line.items()}
            self._write(step, line)
            texts = (f"{name} {f'{n:.4f}' if isinstance(n, float) else n}" for name, n in line.items())
            self.message(f"step {step}: {', '.join(texts)}")

    def restart(self) -> float:
        """Leaves the time since the last step out of the next one's, for example a validation's. Returns it."""
        now = time.perf_counter()
        seconds, self._watch = max(now - self._watch, 1e-9), now
        return seconds

    def message(self, text: str) -> None:
        """Shows text on the first rank, above the progress bar."""
        if self.is_writer:
            self._display.message(text)

    def close(self, *, has_ended: bool = True) -> None:
        """Writes what waits, and ends the trackers.

        Args:
            has_ended: draw the curve of the whole run, earlier parts included, if it was asked for.
        """
        if self._norms is not None:
            self._norms.is_on = False
        if not self.is_writer:
            return
        self._display.close()
        for _, tracker in self._trackers:
            with suppress(Exception):  # a server that is away
                tracker.finish()
        if self.folder is not None and self._curve and has_ended:
            log, curve = self.folder / LOG_FILE, self.folder / CURVE_FILE
            self.files.write(curve, lambda: draw_loss_curve(log, curve))
        self.files.retry()
        if self.files.waiting:
            self.message(f"warning: not written: {', '.join(map(str, self.files.waiting))}")

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(has_ended=kind is None)  # after an error, leave its message as the last one

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or bool(self._steps and step == self._steps[-1])

    def _begin(self, step: int) -> None:
        """Prepares the measurements of the next step."""
        if self._norms is not None:
            self._norms.is_on = self._is_due(step)
        self._figures.end_step()

    def _note_rate(self, optimizer: Optimizer, *_: Any) -> None:
        self._lr = max((group["lr"] for group in optimizer.param_groups if "lr" in group), default=None)

    def _begin_line(self, step: int) -> int:
        try:
            step = index(step)
        except TypeError:
            raise ConfigError(f"step is {step!r}; give its number") from None
        if self._lines is not None:
            self._lines.begin(step)
        return step

    def _write(self, step: int, line: Mapping[str, Any]) -> None:
        """Writes a line to the file and trackers, which the first rank has."""
        # JSON has no NaN: a number that is not finite becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        if self._lines is not None:
            self._lines.add({"step": step, **finite})
            self.files.write(self._lines.path, self._lines.write)
        numbers = {k: v for k, v in finite.items() if v is not None and not isinstance(v, str)}
        for name, tracker in self._trackers:
            try:
                tracker.log(numbers, step=step)
            except Exception as error:  # a server that is away ends no training
                if name not in self._failed:
                    kept = "" if self._lines is None else f"its numbers are in {self._lines.path}, and "
                    self.message(f"warning: tracker {name} failed ({first_line(error)}): {kept}training goes on")
                    self._failed.add(name)
        self.files.retry()


def _check(
    steps: range | None, every: int, chunks: Sequence[nn.Module], optimizer: Optimizer | None, layer_norms: bool
) -> None:
    if not (isinstance(steps, range) or steps is None):
        raise ConfigError(f"steps is {steps!r}; give the range that the loop runs over, such as range(1000)")
    if steps is not None and steps.step < 0:
        raise ConfigError(f"steps is {steps!r}; give a range that counts up")
    if not isinstance(every, Integral) or every < 1:
        raise ConfigError(f"every is {every}; give 1 for a line each step, or a larger whole number")
    if wrong := [chunk for chunk in chunks if not isinstance(chunk, nn.Module)]:
        raise ConfigError(f"model has {wrong[0]!r}; give the nn.Module that the loop calls, or several")
    if not isinstance(optimizer, Optimizer | None):
        raise ConfigError(f"optimizer is {optimizer!r}; give the torch.optim.Optimizer that the loop steps")
    if layer_norms and optimizer is None:
        raise ConfigError("layer_norms needs the optimizer whose steps are measured; give optimizer")


def _checked(name: str, value: Any, *others: type) -> Any:
    """Returns a number of Python, or a tensor, which is not read here."""
    is_one = isinstance(value, Tensor) and (value.numel() == 1 or name == "loss")
    if value is None or is_one or isinstance(value, (int, float, *others)):
        return value
    try:
        if isinstance(value, Tensor | str):
            raise TypeError
        return value.item() if hasattr(value, "item") else float(value)  # numpy's numbers are not all Python's
    except (TypeError, ValueError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
        raise ConfigError(f"{name} is {what}; give a number, or a tensor of one element") from None
