"""Makes what a run stands on, in order: settings checked, process group, parallel groups, seeds."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist

from .. import device, parallel_state
from ..errors import ConfigError
from ..tensor_parallel.random import model_parallel_manual_seed
from .config import PretrainConfig, validate
from .entry import environment_rank, environment_world_size


def initialize(config: PretrainConfig) -> None:
    """Joins the process group, builds the parallel groups, and seeds every generator.

    A rank computes with one thread unless ``OMP_NUM_THREADS`` says otherwise, and ranks other than the first show no
    warnings, which all ranks have alike; the first shows each as one line.

    Raises:
        ConfigError: settings that do not fit together, to the number of ranks, or to the environment; before anything
            is made.
    """
    validate(config, dist.get_world_size() if dist.is_initialized() else environment_world_size())
    if environment_rank() != 0:
        warnings.filterwarnings("ignore")
    warnings.formatwarning = _one_line_warning
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.run.deterministic:
        device.compute_deterministically()
    device.init_process_group(
        config.run.distributed_timeout_minutes, carries_host_tensors=getattr(config.ddp, "cpu_offload", False)
    )
    parallel_state.initialize_model_parallel(
        config.model.tensor_model_parallel_size,
        config.model.pipeline_model_parallel_size,
        context_parallel_size=config.model.context_parallel_size,
        expert_model_parallel_size=config.model.expert_model_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.run.distributed_timeout_minutes,
    )
    seed_everything(config.run.seed)


def check_output_folders(config: PretrainConfig) -> None:
    """Finds out before the training that a folder cannot be written; what did not exist does not exist afterwards.

    Raises:
        ConfigError: on the first rank, which is the one that writes.
    """
    dist.barrier()  # others may still be looking for what lies there
    for flag, folder in (("--save", config.checkpoint.folder), ("--tensorboard-dir", config.run.tensorboard_dir)):
        if folder is None or dist.get_rank() != 0:
            continue
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"{flag} {folder} cannot be written ({error.strerror}); choose another folder") from None
        finally:
            for path in missing:
                with suppress(OSError):
                    path.rmdir()


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> str:
    """What is said and not where from: a run's user did not write the code."""
    return f"warning: {message}\n"


def seed_everything(seed: int) -> None:
    """Seeds torch, its tensor-parallel streams, numpy and Python, on all ranks alike."""
    random.seed(seed)
    np.random.seed(seed)
    model_parallel_manual_seed(seed)
