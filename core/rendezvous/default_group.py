"""Joins the default process group, as a launcher's environment says. Without a launcher a rank is alone.

Wrappers and optimizers do not need it: they take any group that exists.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from ..base.device import BACKENDS, device_type, set_backend_defaults
from ..base.errors import ConfigError
from .environment import check_environment, environment_int
from .job_secret import job_secret
from .launchers import set_launcher_variables, store_of_round
from .signed_store import SignedStore


def init_process_group(timeout_minutes: float = 30.0, *, carries_host_tensors: bool = False) -> None:
    """Joins the default process group from the environment that ``torchrun`` or Slurm's ``srun`` sets, and claims this
    rank's GPU.

    Without a launcher it makes a group of one rank, so that a script needs no second code path. A group that exists,
    as Ray Train makes one, is used as it is, with the GPU that its maker claimed.

    Args:
        carries_host_tensors: carry tensors in host memory, such as offloaded shards, in addition to a GPU's.

    Raises:
        ConfigError: the group exists and does not carry them; or what `check_environment` refuses.
    """
    set_backend_defaults()
    if dist.is_initialized():
        if carries_host_tensors and "gloo" not in (backends := str(dist.get_backend_config())):
            raise ConfigError(
                f"the process group was made with {backends}, and offloaded shards need gloo too; let its maker use "
                "backend='cpu:gloo,cuda:nccl' (under Ray Train TorchConfig(backend=...)), or drop cpu_offload"
            )
        return
    set_launcher_variables()
    kind = device_type()
    check_environment()
    if kind == "cuda":
        torch.cuda.set_device(_local_rank())
    timeout = timedelta(minutes=timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" and carries_host_tensors else BACKENDS[kind]
    try:
        _join(backend, timeout)
    except Exception:
        with suppress(Exception):  # the first error says more
            _reset_group_names()
        raise


_signed: list[SignedStore] = []
"""The store of the last group: torch keeps only the store's C++ half. `_join` sets it."""


def _join(backend: str, timeout: timedelta) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a store that outlives the ranks, and their round
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: Store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
        if secret := job_secret():
            store = SignedStore(store, secret)
            _signed[:] = [store]
        of_round = store_of_round(store, rank, size, timeout)
        dist.init_process_group(backend, store=of_round, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _reset_group_names() -> None:
    """Lets this process number its groups from 0 again after it failed to join, as a new process does.

    Torch counts groups by attempts, and resets the count only when a world is destroyed. Ranks with other counts give
    one group two names, and wait for each other.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _local_rank() -> int:
    count = torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        if (rank := environment_int("LOCAL_RANK", 0)) < count or not count:
            return rank
        if count == 1 and _has_a_gpu_of_its_own():
            return 0
        raise ConfigError(
            f"LOCAL_RANK is {rank}, and torch sees {count} GPU{'s' if count > 1 else ''} on this machine; start one "
            "rank for each GPU (make train NPROC=..., --nproc-per-node), set SHARDSTACK_DEVICE=cpu, or LOCAL_RANK=0 "
            "where every rank sees a GPU of its own"
        )
    if "RANK" in os.environ and count > 1:
        raise ConfigError(
            "RANK is set but LOCAL_RANK is not, so that every rank of this machine would take its first GPU; start "
            "ranks with torchrun, or set LOCAL_RANK (under Slurm to $SLURM_LOCALID)"
        )
    return 0


def _has_a_gpu_of_its_own() -> bool:
    """Returns whether Slurm lets each rank see one GPU: ``--gpus-per-task=1`` or ``--gpu-bind``."""
    is_bound = not {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"}.isdisjoint(os.environ)
    return is_bound or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
