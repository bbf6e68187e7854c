"""The folder that a run of pretrain_gpt.py writes into: its name, its lock, and the checkpoint that it continues."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from shardstack.base import device
from shardstack.base.errors import ConfigError
from shardstack.base.files import BoundsError, brief, read_file, write_durably
from shardstack.dist_checkpointing import latest_checkpoint
from shardstack.dist_checkpointing.agreement import Ranks
from shardstack.dist_checkpointing.format.folders import acquire_folder, complete_checkpoints, release_folder
from shardstack.dist_checkpointing.good_checkpoints import find_checkpoint, is_checkpoint
from shardstack.models.gpt.megatron_layout import find_megatron
from shardstack.training.config import PretrainConfig
from shardstack.training.launch.entry import environment_restart_count
from shardstack.training.launch.messages import RUN_STARTED

STARTED_FILE = ".started"
"""In a folder under ``runs``: `RUN_STARTED` of the launcher whose run made it, which finds it again by that."""
_RUNS = Path("runs")
_folders: dict[str, Path] = {}
"""Folders that this process has named, by `RUN_STARTED`: after another rank was lost, it knows the run's without the
disk. `_agree_on_folder` adds them. Never cleared."""


@contextmanager
def run_folder_named(config: PretrainConfig) -> Iterator[PretrainConfig]:
    """Yields the settings with a folder to write to: that of --save or --load, else a new one under ``runs``.

    A new one is named by the time of the start, with -2, -3, ... if another run has that name. Ranks that start again,
    or go on after others were lost, find the one that they had. Entering it is collective.

    Raises:
        ConfigError: on all ranks: --load has no checkpoint, or no folder can be made.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None and load is not None and find_megatron(load) is None:
        find_checkpoint(load, fall_back=environment_restart_count() > 0)  # refuses a folder without one
        save = load.parent if is_checkpoint(load) else load
    is_new = save is None
    if save is None:
        save = _agree_on_folder(Ranks(error=ConfigError))
    try:
        yield replace(config, checkpoint=replace(config.checkpoint, save=save))
    finally:
        if is_new and dist.get_rank() == 0 and {path.name for path in save.glob("*")} <= {STARTED_FILE}:
            with suppress(OSError):  # another run has a folder there
                (save / STARTED_FILE).unlink(missing_ok=True)
                save.rmdir()
                _RUNS.rmdir()


def _agree_on_folder(ranks: Ranks) -> Path:
    """Returns the folder under ``runs`` of a run without --save: the one that a rank knows, or a new one."""
    started = os.environ.get(RUN_STARTED, "")
    own = None
    if started and environment_restart_count() > 0:
        own = _folders.get(started) or next((path for path in _RUNS.glob("*") if _made_by(path, started)), None)
    known = next((folder for folder in ranks.all_gather(own) if folder is not None), None)
    _folders[started] = ranks.from_first(lambda: _make_folder(started, known))
    return _folders[started]


def _made_by(folder: Path, started: str) -> bool:
    try:
        return read_file(folder / STARTED_FILE, 64).decode(errors="replace") == started
    except (OSError, BoundsError):
        return False


def _make_folder(started: str, known: Path | None) -> Path:
    """Makes a folder that no other run has, also if both make theirs at one moment. Keeps one that is known."""
    name = started.partition(".")[0] or f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if not re.fullmatch(r"[0-9-]+", name):
        raise ConfigError(f"{RUN_STARTED} is {brief(started)} in the environment; only a launcher sets it: unset it")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    try:
        folder = known or next(folder for folder in map(_RUNS.joinpath, names) if _is_made_here(folder))
        folder.mkdir(parents=True, exist_ok=True)  # a known one is not on a machine that takes another's place
        if started:
            write_durably(folder / STARTED_FILE, started)
        return folder
    except OSError as error:
        raise ConfigError(f"{_RUNS} cannot be written ({error.strerror}); choose a folder with --save") from None


def _is_made_here(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
        return True
    except FileExistsError:
        return False


def begin_or_continue(config: PretrainConfig) -> PretrainConfig:
    """Returns the settings with the checkpoint to load chosen. Call it while the run's folder is locked.

    --save and --load may name the same folder from the start, so that one line begins a run and, queued again,
    continues it. Ranks that their launcher has restarted continue their last checkpoint.
    """
    checkpoint = config.checkpoint
    save, load = checkpoint.folder, checkpoint.load
    if save is None:
        return config
    if environment_restart_count() > 0 and complete_checkpoints(save):
        checkpoint = replace(checkpoint, load=save)
    elif load is not None:
        is_same_run = save.resolve() in (load.resolve(), load.resolve().parent)
        saved = latest_checkpoint(save)
        if saved is None and save.resolve() == load.resolve() and not is_checkpoint(load):
            say(f"{load} holds no checkpoint yet: the run starts there")
            checkpoint = replace(checkpoint, load=None)
        elif saved is not None and not is_same_run:
            raise ConfigError(
                f"--save {save} holds a run already, and --load {load} is another; choose a new folder to save to, or "
                f"continue the one with --load {save}"
            )
    elif latest_checkpoint(save) is not None:
        raise ConfigError(
            f"--save {save} holds a run already; continue it with --load {save}, or choose another folder"
        )
    return replace(config, checkpoint=checkpoint)


def check_output_folders(config: PretrainConfig) -> None:
    """Raises before the training if a folder cannot be written. Leaves no folder behind.

    Raises:
        ConfigError: on the first rank, which is the one that writes.
    """
    device.barrier()  # other ranks may still read the folders
    for flag, folder in (("--save", config.checkpoint.folder), ("--tensorboard-dir", config.run.tensorboard_dir)):
        if folder is None or dist.get_rank() != 0:
            continue
        try:
            with _empty_folders_removed(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise ConfigError(f"{flag} {folder} cannot be written ({error.strerror}); choose another folder") from None


@contextmanager
def _empty_folders_removed(folder: Path) -> Iterator[None]:
    """Removes those of a folder and its parents that the code inside creates and leaves empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def run_folder_held(folder: Path | None) -> Iterator[None]:
    """Holds the lock of a run's folder, which the first rank takes for all. Entering it is collective.

    Creates the folder, and removes it again if the run ends before it writes anything.

    Raises:
        CheckpointError: on all ranks: another run holds it.
    """
    if folder is None:
        yield
        return
    ranks = Ranks()
    with _empty_folders_removed(folder) if ranks.is_first else nullcontext():
        key = ranks.from_first(lambda: acquire_folder(folder))
        try:
            yield
        finally:
            if ranks.is_first:
                release_folder(key)


def say(text: str) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
