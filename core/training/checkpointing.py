"""Saves and loads all of a run's state: model, optimizer, schedule, random streams and the position in the data.

A checkpoint has tensors of the whole model, so that any number of ranks and any wrapper can continue it. It has fp32
master weights instead of the low-precision parameters rounded from them; under FSDP2 the parameters are the masters.
Frozen parameters have no masters: they are saved in the model's precision, and cast when the loading run has another.
"""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from .. import dist_checkpointing
from ..base.errors import CheckpointError, ShardstackError
from ..base.files import brief
from ..base.random_streams import set_packed_rng_state
from ..comm.record import recorded
from ..dist_checkpointing.agreement import Ranks, pipeline_ranks
from ..dist_checkpointing.format.content_hash import joint_hash
from ..dist_checkpointing.format.reader import FINITE, SKIPPED
from ..dist_checkpointing.good_checkpoints import advice, another_offered, find_checkpoint, is_checkpoint, newest_good
from ..dist_checkpointing.loading import held_hashes
from ..dist_checkpointing.model_state import MODEL
from ..dist_checkpointing.run_state import STREAMS, RunState, own_streams, rank_layout
from ..dist_checkpointing.saving import all_finite
from ..tokenizers import Tokenizer
from .config import PretrainConfig
from .state import TrainingState, check_is_run, check_same_model, warn_of_another_order

TOKENIZER_FILE = "tokenizer.json"
_UNIT = "counts_samples"
"""Entry of the schedule's state: whether it counts samples. Without it, it counts iterations."""


def save_checkpoint(
    state: TrainingState, config: PretrainConfig, root: Path, *, saver: dist_checkpointing.AsyncSaver | None = None
) -> Path:
    """Writes ``root/iter_<iteration>`` and points ``root/latest`` to it. Collective.

    Args:
        saver: writes it in the background; its `wait` then raises if it failed.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    tensors, metadata = run_state(state, config)
    folder = dist_checkpointing.checkpoint_directory(root, state.iteration)
    metadata[FINITE] = all_finite(tensors, Ranks())
    write = dist_checkpointing.save if saver is None else saver.save
    write(tensors, folder, metadata=metadata, keep=config.checkpoint.retention)
    return folder


def run_state(state: TrainingState, config: PretrainConfig) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns all that a checkpoint holds of a run: the tensors of this rank, and the metadata."""
    settings = config.checkpoint
    tensors, streams = state_tensors(state, settings.save_optim), own_streams() if settings.save_rng else {}
    metadata = {
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "vocab_size": state.vocab_size,
        "config": config.to_json(),
        "optimizer": state.optimizer.state_scalars() if settings.save_optim else {},
        "scheduler": state.scheduler.state_dict() | {_UNIT: config.counts_samples},
        "model_tensors": _of_all_stages([name for name in tensors if name.startswith(MODEL)]),
        "rng_bytes": sum(map(len, streams.values())),
        "layout": rank_layout(),
        "sample_order": dict(state.sample_order),
        SKIPPED: state.skipped_steps,
    }
    return tensors | streams, metadata


def load_checkpoint(
    state: TrainingState, config: PretrainConfig, root: Path, *, fall_back: bool = False, same_on_all: bool = True
) -> str:
    """Continues `state` in place from the latest checkpoint in `root`, or from `root` if it is one. Collective.

    Warns if samples come in another order than in the checkpoint's run.

    Args:
        fall_back: if the latest is damaged or its weights are not finite, continue from the newest good one; for a run
            that is restarted automatically.
        same_on_all: False: `root` is a checkpoint, in a folder of each machine's own.

    Returns:
        A line that says what was compared with hashes, and how long it took.

    Raises:
        CheckpointError: there is none, it is damaged, its weights are not finite, or it is of another model. The
            message names the newest older checkpoint that is good.
    """
    ranks = Ranks()
    folder = ranks.from_first(lambda: find_checkpoint(root, fall_back=fall_back)) if same_on_all else root
    if fall_back and not is_checkpoint(root):
        good = newest_good(root, ranks)
        if good is not None and good != folder:
            warnings.warn(f"{folder} is no good; continuing from {good}", stacklevel=2)
            folder = good
    with another_offered(folder, ranks):
        metadata = ranks.from_first(lambda: dist_checkpointing.load_metadata(folder))
    check_is_run(metadata, folder)
    settings = config.checkpoint
    if not metadata["optimizer"] and settings.load_optim:
        raise CheckpointError(
            f"{folder} holds weights alone, and no run to continue; start one with --pretrained-checkpoint {root}, or "
            "add --no-load-optim"
        )
    check_same_model(metadata, state, config, folder)
    if metadata.get(FINITE) is False:
        raise CheckpointError(f"{folder} holds weights that are infinite or NaN; {advice(folder, ranks)}")
    streams = own_streams(metadata) if settings.load_rng else {}
    lines: list[str] = []
    with another_offered(folder, ranks):
        targets, strict = state_tensors(state, settings.load_optim) | streams, settings.load_optim
        verify, report = settings.verify_checkpoint, lines.append
        dist_checkpointing.load(
            targets, folder, strict=strict, verify=verify, cast=True, report=report, optional=STREAMS
        )
    try:
        scalars = metadata["optimizer"] if settings.load_optim else state.optimizer.state_scalars()
        state.optimizer.load_state_scalars(scalars, with_groups=False)  # the schedule has its own
        if settings.load_optim:
            if (in_samples := metadata["scheduler"].get(_UNIT, False)) != config.counts_samples:
                units = ("samples", "iterations") if in_samples else ("iterations", "samples")
                raise CheckpointError(
                    f"{folder}: the schedule counts {units[0]} in the checkpoint, and {units[1]} here; keep to "
                    "--train-samples or --train-iters, and to a batch that grows or not"
                )
            state.scheduler.load_state_dict(metadata["scheduler"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder}: the metadata of optimizer and schedule is none that a run writes ({type(error).__name__}: "
            f"{brief(str(error))}); load another one"
        ) from None
    state.iteration, state.consumed_samples = metadata["iteration"], metadata["consumed_samples"]
    warn_of_another_order(metadata.get("sample_order", {}), state)
    for streams_of_rank in streams.values():
        set_packed_rng_state(streams_of_rank)
    return lines[0]


def save_tokenizer(tokenizer: Tokenizer, root: Path) -> None:
    """Saves the run's tokenizer next to its checkpoints, for programs that generate text. One rank calls it."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(root / TOKENIZER_FILE)


def weights_hash(state: TrainingState) -> str:
    """Returns the hash of the model's tensors in the checkpoint that the run would save now. Collective."""
    return joint_hash(held_hashes(state_tensors(state, with_optimizer=False), Ranks()))


def state_tensors(state: TrainingState, with_optimizer: bool = True) -> dict[str, torch.Tensor]:
    """Returns every tensor of the whole model and its optimizer by name. They share this rank's storage."""
    tensors = RunState(state.chunks, state.optimizer).tensors()
    return {name: tensor for name, tensor in tensors.items() if with_optimizer or name.startswith(MODEL)}


def _of_all_stages(names: list[str]) -> list[str]:
    """Returns the names of tensors on all pipeline stages, sorted. Collective if there are several."""
    return sorted({name for of_rank in pipeline_ranks().all_gather(names) for name in of_rank})


_LAST_WAIT_S = 60.0


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Saves checkpoints of a run. Every rank enters it. Leaving it waits for the checkpoint that is being written."""

    def __init__(self, config: PretrainConfig, folder: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._saver = dist_checkpointing.AsyncSaver() if config.checkpoint.async_save and folder is not None else None
        self.last_folder: Path | None = None
        """Folder of the last checkpoint that was begun. It may still be written, or have failed. `save` sets it. None
        before the first."""

    def save(self, state: TrainingState) -> str:
        """Saves a checkpoint, or begins to, and returns a line about it.

        Raises:
            CheckpointError: on all ranks: this checkpoint failed, or the previous one, written in the background.
            OutOfStepError: another rank did not answer.
        """
        if self._folder is None:
            raise CheckpointError("there is no folder to save to; add --save FOLDER")
        started_at = time.perf_counter()
        with recorded("save", "the run's checkpoint", 0):
            self.last_folder = save_checkpoint(state, self._config, self._folder, saver=self._saver)
        seconds = time.perf_counter() - started_at
        if self._saver is None:
            return f"saved {self.last_folder} in {seconds:.1f} s"
        return f"saving {self.last_folder} while training went on, which waited {seconds:.2f} s"

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure, which `finish` will raise on all ranks."""
        return self._saver is not None and self._saver.has_failed

    def finish(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits for the last checkpoint. After an error that all ranks raise, for a limited time. After a crash,
        does not wait."""
        if error is None:
            self.finish()
        elif self._saver is not None and isinstance(error, ShardstackError):
            with suppress(CheckpointError):  # the error that left the block came first
                self._saver.wait(_LAST_WAIT_S)
