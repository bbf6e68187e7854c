"""Chooses the device of a rank and the backend of its collectives.

CUDA with NCCL if there is a GPU, else CPU with gloo. ``SHARDSTACK_DEVICE=cpu`` keeps a machine with GPUs on the CPU.
Once a default process group exists its backend decides, so that a rank under gloo or torch's ``fake`` backend never
uses a GPU that it was not assigned.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from .environment import check_environment, environment_int
from .errors import ConfigError
from .host_memory import host_memory_bytes
from .job_secret import job_secret
from .rendezvous import set_launcher_variables, store_of_round
from .seam import Seam
from .signed_store import SignedStore
from .text import choices

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_GLOO_LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
_NCCL_HOST_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")  # https://docs.nvidia.com/cuda/cublas, "Results reproducibility"


def device_type() -> str:
    """Returns ``"cuda"`` or ``"cpu"``: the device of this process's parameters, activations and collectives."""
    if dist.is_available() and dist.is_initialized():
        return "cuda" if "nccl" in dist.get_backend_config() else "cpu"  # get_backend() may say "undefined"
    name = os.environ.get("SHARDSTACK_DEVICE")
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in _BACKENDS:
        raise ConfigError(f"SHARDSTACK_DEVICE is {name!r}; {choices(name, _BACKENDS)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("SHARDSTACK_DEVICE is 'cuda', but torch sees no GPU; unset it, or set it to 'cpu'")
    return name


def current_device() -> torch.device:
    """Returns the device of this process, with its index if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


CPU_STANDS_FOR_GPU: Seam[bool] = Seam(False)
"""Whether `is_on_gpu` takes the CPU for a GPU, as the planner does for a step that it simulates."""


def is_on_gpu(tensor: Tensor) -> bool:
    """Returns whether code should choose what suits a GPU: large pieces, and shapes that depend on no values."""
    return tensor.is_cuda or CPU_STANDS_FOR_GPU.value


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
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" and carries_host_tensors else _BACKENDS[kind]
    try:
        _join(backend, timeout)
    except Exception:
        with suppress(Exception):  # the first error says more
            _reset_group_names()
        raise


_signed: list[SignedStore] = []
"""The store of the last group: torch keeps the C++ half of it alone. `_join` sets it."""


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


def set_backend_defaults() -> None:
    """Sets, for groups that connect from now on, what the environment leaves open. On CPU does nothing.

    NCCL starts collectives of several groups on the device in the host's order (since 2.26). Ranks whose devices start
    two of them in different orders may wait for each other.

    Next to NCCL gloo carries little: its ranks connect when they first talk. All to all at once is a socket for each
    other rank and group, beyond the usual limit of 1,024 open files at a thousand ranks.
    """
    if device_type() == "cuda":
        os.environ.setdefault(_GLOO_LAZY_INIT, "1")
        os.environ.setdefault(_NCCL_HOST_ORDER, "1")


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


def compute_deterministically() -> None:
    """Makes this process compute the same bits in every run. Call it before its first work on a GPU.

    Torch then chooses operations that add in one order, and raises, naming the operation, if it has none.

    Raises:
        ConfigError: the environment sets a workspace of cuBLAS with which it is not deterministic.
    """
    space = os.environ.setdefault(_CUBLAS_WORKSPACE, _CUBLAS_DETERMINISTIC[0])
    if space not in _CUBLAS_DETERMINISTIC:
        raise ConfigError(
            f"{_CUBLAS_WORKSPACE} is {space!r}, with which cuBLAS is not deterministic; unset it, or set it to "
            f"{' or '.join(_CUBLAS_DETERMINISTIC)}"
        )
    # These settings of torch hold for the whole process and are never reset.
    torch.use_deterministic_algorithms(True)
    # Filling allocated memory costs time, and nothing here reads it before writing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def memory_bytes() -> int:
    """Returns the total memory of this process's device in bytes: of its GPU, or of the machine."""
    if device_type() == "cuda":
        return torch.cuda.get_device_properties(current_device()).total_memory
    return host_memory_bytes()


def barrier() -> None:
    """Waits for all ranks.

    Names this rank's GPU: without a bound one NCCL would guess it from the rank, and block or fail where ranks are not
    numbered by GPU (uneven nodes, cyclic Slurm).
    """
    dist.barrier(device_ids=[torch.cuda.current_device()] if device_type() == "cuda" else None)
