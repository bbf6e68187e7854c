"""Chooses the device of a rank and the backend of its collectives.

CUDA with NCCL if there is a GPU, else CPU with gloo. ``SHARDSTACK_DEVICE=cpu`` keeps a machine with GPUs on the CPU.
Once a default process group exists its backend decides, so that a rank under gloo or torch's ``fake`` backend never
uses a GPU that it was not assigned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch_compat import called_while_compiled
from .errors import ConfigError
from .text import choices

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""The backend of collectives on each device."""
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_GLOO_LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
_NCCL_HOST_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")  # https://docs.nvidia.com/cuda/cublas, "Results reproducibility"

T = TypeVar("T")


class Seam(Generic[T]):
    """A value of the process that a simulation of other devices changes for a while: the planner's, and the tests'.

    It is one value for all threads. Code reads `value` where it needs it, and `replaced` alone changes it.
    """

    def __init__(self, value: T) -> None:
        # `replaced` sets and restores it, on one thread. Every thread reads it.
        self.value = value

    @contextmanager
    def replaced(self, value: T) -> Iterator[None]:
        """Puts another value in its place inside the ``with`` block, for all threads."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


def device_type() -> str:
    """Returns ``"cuda"`` or ``"cpu"``: the device of this process's parameters, activations and collectives."""
    if dist.is_available() and dist.is_initialized():
        return "cuda" if "nccl" in dist.get_backend_config() else "cpu"  # get_backend() may say "undefined"
    name = os.environ.get("SHARDSTACK_DEVICE")
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in BACKENDS:
        raise ConfigError(f"SHARDSTACK_DEVICE is {name!r}; {choices(name, BACKENDS)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("SHARDSTACK_DEVICE is 'cuda', but torch sees no GPU; unset it, or set it to 'cpu'")
    return name


def current_device() -> torch.device:
    """Returns the device of this process, with its index if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


CPU_STANDS_FOR_GPU: Seam[bool] = Seam(False)
"""Whether `is_on_gpu` takes the CPU for a GPU, as the planner does for a step that it simulates."""


MEMORY_BYTES: Seam[int | None] = Seam(None)
"""What `memory_bytes` returns: of the GPU that the planner simulates, else None, and torch is asked."""


def is_on_gpu(tensor: Tensor) -> bool:
    """Returns whether code should choose what suits a GPU: large pieces, and shapes that depend on no values."""
    return tensor.is_cuda or CPU_STANDS_FOR_GPU.value


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


def host_memory_bytes() -> int:
    """Returns the total memory of the machine in bytes, or if it is unknown a number that exceeds any machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


@called_while_compiled
def memory_bytes() -> int:
    """Returns the total memory of this process's device in bytes: of its GPU, or of the machine."""
    if MEMORY_BYTES.value is not None:
        return MEMORY_BYTES.value
    if device_type() == "cuda":
        return torch.cuda.get_device_properties(current_device()).total_memory
    return host_memory_bytes()


def barrier() -> None:
    """Waits for all ranks.

    Names this rank's GPU: without a bound one NCCL would guess it from the rank, and block or fail where ranks are not
    numbered by GPU (uneven nodes, cyclic Slurm).
    """
    dist.barrier(device_ids=[torch.cuda.current_device()] if device_type() == "cuda" else None)
