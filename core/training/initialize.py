"""Sets up a run, in order: checks settings, joins the process group, builds parallel groups, seeds."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from .. import device, parallel_state
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.folders import acquire_folder, release_folder
from ..errors import ConfigError
from ..rendezvous import set_launcher_variables
from ..tensor_parallel.random import seed_everything
from .config import PretrainConfig, validate
from .launch.environment import check_launcher, environment_rank, environment_threads, environment_world_size

_SEEDS_OF_A_REPLICA = 10
"""Difference of the seeds of data-parallel replicas under ``data_parallel_random_init``; Megatron-LM's."""


def initialize(config: PretrainConfig) -> None:
    """Joins the process group, builds the parallel groups, and seeds every generator.

    A rank computes with one thread unless ``OMP_NUM_THREADS`` is set, or the optimizer runs on the host for a GPU.
    Only the first rank shows warnings, which are the same on all ranks, each as one line.

    Raises:
        ConfigError: settings contradict each other, the number of ranks, or the environment; raised before anything is
            created.
    """
    set_launcher_variables()
    validate(config, dist.get_world_size() if dist.is_initialized() else environment_world_size())
    if not dist.is_initialized():
        check_launcher()
    if environment_rank() != 0:
        warnings.filterwarnings("ignore")
    warnings.formatwarning = _one_line_warning
    offloads = getattr(config.ddp, "cpu_offload", False)
    torch.set_num_threads(environment_threads(updates_on_host=offloads and device.device_type() == "cuda"))
    device.set_fp32_matmul_precision(config.run.fp32_matmul_precision)
    if config.run.deterministic or config.ddp.reproducible_across_ranks:
        device.compute_deterministically()
    device.init_process_group(config.run.distributed_timeout_minutes, carries_host_tensors=offloads)
    parallel_state.initialize_model_parallel(
        config.model.tensor_model_parallel_size,
        config.model.pipeline_model_parallel_size,
        context_parallel_size=config.model.context_parallel_size,
        expert_model_parallel_size=config.model.expert_model_parallel_size,
        expert_tensor_parallel_size=config.model.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.run.distributed_timeout_minutes,
    )
    replica = parallel_state.get_data_parallel_rank() if config.run.data_parallel_random_init else 0
    seed_everything(config.run.seed + _SEEDS_OF_A_REPLICA * replica)


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


def check_model_fits(config: PretrainConfig, vocab_size: int) -> None:
    """Refuses a model whose weights alone exceed the memory of this rank, before it is built.

    Raises:
        ConfigError: names both sizes.
    """
    model = config.model
    attention = 2 * model.hidden_size * (model.kv_channels or 1) * model.num_attention_heads
    widths = (model.num_layers - model.num_expert_layers) * (model.ffn_hidden_size or 1)
    of_experts = (model.num_moe_experts or 0) * model.expert_ffn_size + (
        model.moe_shared_expert_intermediate_size or 0
    )
    widths += model.num_expert_layers * of_experts
    mlps = model.hidden_size * widths * (3 if model.gated_linear_unit else 2)
    parameters = vocab_size * model.hidden_size + model.num_layers * attention + mlps
    pieces = dist.get_world_size() if config.ddp.shards_parameters else model.tensor_model_parallel_size
    needed, there = 4 * parameters // pieces, device.memory_bytes()
    if needed > there:
        raise ConfigError(
            f"num_layers {model.num_layers}, hidden_size {model.hidden_size} and a vocabulary of {vocab_size} make "
            f"{parameters / 1e9:.3g} billion parameters: {needed / 2**30:.3g} GiB of weights on each rank, which has "
            f"{there / 2**30:.3g} GiB; make the model smaller, or shard it over more ranks"
        )


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Formats a warning without its place in the code, which a run's user did not write."""
    return f"warning: {message}\n"
