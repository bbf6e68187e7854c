"""Sets up a run, in order: checks settings, joins the process group, builds parallel groups, seeds."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base import device
from ..base.rendezvous import set_launcher_variables
from ..tensor_parallel.random import seed_everything
from .config import PretrainConfig, validate
from .launch.entry import check_launcher, environment_rank, environment_threads, environment_world_size

_SEEDS_OF_A_REPLICA = 10
"""Difference of the seeds of data-parallel replicas under ``data_parallel_random_init``, as in Megatron-LM."""


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
    make_groups(config)
    replica = parallel_state.get_data_parallel_rank() if config.run.data_parallel_random_init else 0
    seed_everything(config.run.seed + _SEEDS_OF_A_REPLICA * replica)


def make_groups(config: PretrainConfig) -> None:
    """Makes the groups of `core.parallel_state` in the world that exists."""
    parallel_state.initialize_model_parallel(
        config.model.tensor_model_parallel_size,
        config.model.pipeline_model_parallel_size,
        config.model.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.model.context_parallel_size,
        expert_model_parallel_size=config.model.expert_model_parallel_size,
        expert_tensor_parallel_size=config.model.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.run.distributed_timeout_minutes,
    )


def _one_line_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Formats a warning without its place in the code, which a run's user did not write."""
    return f"warning: {message}\n"
