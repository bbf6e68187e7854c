"""Runs the iterations of a run: step, log, validate, save. Ends in order when a signal requests it."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, schedule, tensorboard_trace_handler

from ..base.errors import ConfigError, OptimizerError, ShardstackError
from ..optimizer.grad_scaler import DynamicGradScaler
from ..run_log import RunLog
from ..run_log.trackers import TensorBoard
from ..tensor_parallel.random import MicroBatchSeeds
from .checkpointing import TOKENIZER_FILE, CheckpointWriter, run_state, save_tokenizer, weights_hash
from .config import PretrainConfig
from .data import Batch, RunData, open_batches
from .launch.generations import current_generation, report_step
from .launch.processes import StopRequest
from .memory_profile import PICTURE_FILE, measure_step, write_timeline
from .recovery import StepCopies
from .state import TrainingState
from .train_step import TIME_IS_OVER, RunningStep, evaluate, train_step

_WANDB = {"wandb_project": "WANDB_PROJECT", "wandb_exp_name": "WANDB_NAME", "wandb_save_dir": "WANDB_DIR"}
"""Variables of the package wandb, by setting."""
_STARTED_AT = time.monotonic()
"""When the program started: this module's import is a part of that."""
MODEL_FILE = "model.html"
PROFILED_ITERATION = 3
"""The iteration whose memory is measured on request: the optimizer has its state and the wrapper its buffers by
then."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    iteration: int
    validation_loss: float | None
    """Nats per token after the last iteration. None if it was not reached or the run validates nothing."""
    checkpoint: Path | None
    """The last checkpoint that was written. None if there is none."""
    stopped_by: str
    """Name of the signal, or of the setting, that ended the run before its last iteration. Empty if none did."""


def train(state: TrainingState, config: PretrainConfig, data: RunData) -> Outcome:
    """Trains from `state.iteration` to `train_iters`. All ranks call it together.

    SIGTERM and Ctrl-C on any rank end it on all ranks after the step that follows the current one, with a checkpoint
    if there is a folder: the host reads a step's result while the next one is computed.
    When this returns, the last checkpoint is complete, also with `async_save`.

    Raises:
        ConfigError: steps or their memory are to be profiled and there is no folder.
        DataError: no samples are left.
        CheckpointError: a checkpoint cannot be written; with `async_save` it is raised after the next step.
        OptimizerError: gradients stay infinite or NaN.
    """
    for flag, is_set in (("--profile-memory", config.run.profile_memory), ("--profile", config.run.profile)):
        if is_set and config.checkpoint.folder is None:
            raise ConfigError(f"{flag} writes into the run's folder, and there is none; add --save FOLDER")
    begun_at = state.iteration
    try:
        return _train(state, config, data)
    except ShardstackError as error:
        error.ended_run = state.iteration > begun_at
        raise


def _train(state: TrainingState, config: PretrainConfig, data: RunData) -> Outcome:
    folder, is_writer, world_size = config.checkpoint.folder, dist.get_rank() == 0, dist.get_world_size()
    num_microbatches, micro_batch = config.num_microbatches(world_size), config.data.micro_batch_size
    in_samples = config.counts_samples
    begun_at, last, exit_interval = state.iteration, config.train_iters(world_size), config.run.exit_interval
    tree, generation, profiles = state.model.plan.tree, current_generation(), config.run.profile_memory and is_writer
    ends_at = _STARTED_AT + 60 * (config.run.exit_duration_in_mins or math.inf)
    validation_loss: float | None = None
    stop = False
    opened: Callable[..., AbstractContextManager[Iterator[Batch]]] = open_batches if begun_at < last else _no_batches
    for chunk in state.chunks:
        chunk.train()
    with (
        StopRequest() as request,
        _open_log(state, config) as log,
        CheckpointWriter(config, folder) as writer,
        opened(data.train, config, state.consumed_samples, tree) as batches,
        StepCopies(partial(run_state, state, config), begun_at, config.run.copy_interval) as copies,
        _profiler(config, folder) as profiler,
    ):
        if folder is not None and is_writer and data.tokenizer is not None:
            log.files.write(folder / TOKENIZER_FILE, partial(save_tokenizer, data.tokenizer, folder))
        if generation is None or not generation.lost:
            _show_model(log, state, num_microbatches)
            if table := state.optimizer.describe():
                log.message(table)
        reporter = _Reporter(state, log, writer)
        while state.iteration < last and not stop:
            step_begun, sizes = time.monotonic(), (world_size, state.consumed_samples)
            num_samples, asked = config.global_batch_size(*sizes), request.requested or writer.has_failed
            seeds = MicroBatchSeeds(config.run.seed, state.consumed_samples // micro_batch)
            step = partial(train_step, state.chunks, state.optimizer, state.scheduler, batches)
            step = partial(step, config.num_microbatches(*sizes), increment=num_samples if in_samples else 1)
            step = partial(step, seeds=None if tree is None else seeds, before_update=copies.wait)
            step = partial(step, stop_requested=TIME_IS_OVER if step_begun > ends_at else asked)
            is_profiled = profiles and state.iteration + 1 == min(begun_at + PROFILED_ITERATION, last)
            running = _profile_step(step, state, folder, log) if is_profiled and folder is not None else step()
            state.iteration += 1
            state.consumed_samples += num_samples
            stop = reporter.take(running, num_samples * config.data.seq_length)
            if profiler is not None:
                profiler.step()
            if _is_due(state.iteration, config.run.log_weights_hash):
                reporter.note_hash(weights_hash(state))
            is_last, exits = state.iteration == last, _is_due(state.iteration, exit_interval)
            validates = data.valid is not None and (is_last or _is_due(state.iteration, config.run.eval_interval))
            saves = folder is not None and (is_last or _is_due(state.iteration, config.checkpoint.save_interval))
            reads = stop or exits or validates or saves or is_last or config.run.log_layer_norms
            if reads or copies.is_due(state.iteration):
                stop = reporter.finish() or stop or exits
            copies.start(state.iteration)
            if generation is not None and generation.lost and state.iteration == begun_at + 1:
                seconds, ranks = time.time() - generation.lost_at, generation.world_size
                log.log(state.iteration, lost=generation.lost, recovery_s=seconds, ranks=ranks)
            stop &= not is_last
            if data.valid is not None and validates and not stop:
                with open_batches(data.valid, config) as validation:
                    num_batches = config.run.eval_iters * num_microbatches
                    validation_loss = evaluate(state.chunks, validation, num_batches, num_microbatches)
                log.log(state.iteration, validation_loss=validation_loss)
            if folder is not None and (saves or stop):
                log.message(f"iteration {state.iteration}: {writer.save(state)}")
            report_step(state.iteration, time.monotonic() - step_begun)
            log.restart()  # exclude the time of validation and saving
    final_loss = validation_loss if state.iteration == last else None
    reason = "exit_duration_in_mins" if reporter.is_late else request.signal_name or "a signal to another rank"
    stopped_by = "" if not stop else "exit_interval" if _is_due(state.iteration, exit_interval) else reason
    return Outcome(
        iteration=state.iteration, validation_loss=final_loss, checkpoint=writer.last_folder, stopped_by=stopped_by
    )


def _open_log(state: TrainingState, config: PretrainConfig) -> RunLog:
    """Opens the log, in the run's folder, in TensorBoard's, and in trackers."""
    first, folder, tensorboard = state.iteration + 1, config.checkpoint.folder, config.run.tensorboard_dir
    trackers: list[Any] = [*config.run.trackers]
    wandb = {_WANDB[name]: str(value) for name, value in vars(config.run).items() if name in _WANDB and value}
    os.environ.update(wandb)
    if wandb and "wandb" not in trackers:
        trackers.append("wandb")
    if tensorboard is not None and dist.get_rank() == 0:
        trackers.append(TensorBoard(tensorboard, first))
    return RunLog(
        folder,
        steps=range(first, config.train_iters(dist.get_world_size()) + 1),
        every=config.run.log_interval,
        trackers=trackers,
        model=state.chunks,
        optimizer=state.optimizer,
        layer_norms=config.run.log_layer_norms,
        average_loss=False,  # it is the same on all ranks
        curve=folder is not None,
        settings=config.to_json(),
    )


def _show_model(log: RunLog, state: TrainingState, num_microbatches: int) -> None:
    """Shows the description of the wrapped model, and writes it as a page, ``model.html``."""
    if not log.is_writer:
        return
    log.message(state.model.describe(num_microbatches=num_microbatches))
    if log.folder is not None:
        page, target = state.model.describe("html", num_microbatches), log.folder / MODEL_FILE
        log.files.write(target, partial(target.write_text, page, encoding="utf-8"))


def _no_batches(*_: object) -> AbstractContextManager[Iterator[Batch]]:
    return nullcontext(iter(()))


def _profile_step(step: Callable[[], RunningStep], state: TrainingState, folder: Path, log: RunLog) -> RunningStep:
    """Runs a step, and draws the memory that it has used into the run's folder."""
    iteration = state.iteration + 1
    running, timeline = measure_step(state.model, state.optimizer, step)
    log.files.write(folder / PICTURE_FILE, partial(write_timeline, timeline, folder, iteration))
    log.message(f"iteration {iteration}: drew {folder / PICTURE_FILE}")
    return running


class _Reporter:
    """Logs and checks each step when its result is known: while the next step is queued, or when the run needs it.

    So the device always has a step to compute. The run stops, or gives up after too many skipped steps, one step after
    the step that caused it.
    """

    def __init__(self, state: TrainingState, log: RunLog, writer: CheckpointWriter) -> None:
        self._state, self._log, self._writer = state, log, writer
        self._skips = SkippedSteps(scale_adapts=isinstance(state.optimizer.grad_scaler, DynamicGradScaler))
        # Steps that were skipped since the last line of the log. `_report` counts, and clears it with a line.
        self._num_skipped = 0
        self.is_late = False
        """Whether a step that was reported found the run's time over, on any rank. `_report` sets it."""
        # The last step, while it is not reported, with its tokens, iteration and seconds. `take` sets it, `_report`
        # clears it.
        self._waiting: tuple[RunningStep, int, int, float] | None = None
        # The hash of the weights after that step; None if it was not asked for. `note_hash` sets it, `_report` clears
        # it.
        self._hash: str | None = None

    def take(self, running: RunningStep, tokens: int) -> bool:
        """Takes the step of the current iteration, and reports the one before it. Returns whether that says to
        stop."""
        seconds = self._log.restart()
        stop = self._report(0.0)
        self._waiting = (running, tokens, self._state.iteration, seconds)
        return stop

    def note_hash(self, weights_hash: str) -> None:
        """Takes the hash of the weights after the step taken last. Computing it is no part of the next step's time."""
        self._hash = weights_hash
        self._log.restart()

    def finish(self) -> bool:
        """Waits for the last step and reports it. Returns whether it says to stop."""
        if self._waiting is not None:
            self._waiting[0].result()
        return self._report(self._log.restart())

    def _report(self, waited_s: float) -> bool:
        if self._waiting is None:
            return False
        (running, tokens, iteration, seconds), self._waiting = self._waiting, None
        hashed, self._hash = self._hash, None
        result = running.result()
        self._num_skipped += not result.has_update
        self.is_late |= result.is_late
        values: dict[str, Any] = {"grad_norm": result.grad_norm, "num_zeros": result.num_zeros, **result.experts}
        values |= {"loss_scale": result.loss_scale, "skipped": self._num_skipped, "tokens": tokens}
        if self._log.step(iteration, result.loss, lr=result.lr, seconds=seconds + waited_s, **values):
            self._num_skipped = 0
        if hashed is not None:
            self._log.log(iteration, weights_hash=hashed)
        if result.stop:
            self._writer.finish()  # raises on all ranks if the failed checkpoint is the reason
        self._skips.note(iteration, result.has_update)
        self._state.skipped_steps = self._skips.in_a_row
        return result.stop


def _profiler(config: PretrainConfig, folder: Path | None) -> AbstractContextManager[Any]:
    """Opens torch's profiler on the ranks that are traced. Its `step` is called after each step."""
    run, ranks = config.run, range(dist.get_world_size())
    if run.profile and dist.get_rank() == 0 and (absent := [r for r in run.profile_ranks if r not in ranks]):
        warnings.warn(
            f"profile_ranks names {', '.join(map(str, absent))}, and this run has ranks 0 to {ranks[-1]}: the others "
            "alone are traced",
            stacklevel=2,
        )
    if not run.profile or folder is None or dist.get_rank() not in run.profile_ranks:
        return nullcontext()
    start, warmup = run.profile_step_start, min(run.profile_step_start, 1)
    steps = schedule(wait=start - warmup, warmup=warmup, active=run.profile_step_end - start, repeat=1)
    return profile(schedule=steps, on_trace_ready=tensorboard_trace_handler(str(folder / "profile")))


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


LIMIT = 10
"""Skipped steps in a row that end a run: only the data changes in between."""


class SkippedSteps:
    """Warns about the first skipped step, and ends the run after `LIMIT` in a row. All ranks skip the same steps.

    Args:
        scale_adapts: the loss scale is dynamic, so that overflows are normal: do nothing.
    """

    def __init__(self, *, scale_adapts: bool) -> None:
        self._scale_adapts = scale_adapts
        self.in_a_row = 0
        """Skipped steps in a row, up to the last step. `note` counts, and a step that was made resets it."""
        self._has_warned = False
        """Whether a skipped step was warned about. `note` sets it, for the rest of the run."""

    def note(self, iteration: int, has_update: bool) -> None:
        """Counts one step.

        Raises:
            OptimizerError: the limit is reached.
        """
        self.in_a_row = 0 if has_update or self._scale_adapts else self.in_a_row + 1
        if self.in_a_row >= LIMIT:
            raise OptimizerError(
                f"gradients have been infinite or NaN for {LIMIT} steps, up to iteration {iteration}, and nothing was "
                "learned; lower --lr, lengthen the warm-up, or find the parameter with --check-for-nan-in-grad"
            )
        if self.in_a_row and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"iteration {iteration} is skipped: its gradients are infinite or NaN; {LIMIT} such steps end the run",
                stacklevel=2,
            )
