"""Copies values to the host, and destroys the process group."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..._torch_compat import forget_sharding_decisions


def to_cpu(v: Any) -> Any:
    """Returns a tensor in the host's memory: a DTensor on an accelerator is gathered whole, which all its ranks must
    call.

    A DTensor on the CPU gives its local tensor, other tensors ``v.cpu()``, and anything else is given back.

    Raises:
        ValueError: a DTensor on a device that is neither.
    """
    if not isinstance(v, DTensor):
        return v.cpu() if isinstance(v, torch.Tensor) else v
    if v.device.type == "cpu":
        return v.to_local()
    if not _is_accelerator(v.device.type):
        raise ValueError(f"to_cpu was given a DTensor on the device {v.device}; it takes one on cpu or an accelerator")
    return v.full_tensor().cpu()


def _destroy_dist_connection() -> None:
    """Destroys the process group, if there is one, and lets no interrupt stop it halfway.

    SIGINT is ignored meanwhile, and its handler before is put back. Handlers belong to the main thread; another one
    destroys without.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
            forget_sharding_decisions()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _is_accelerator(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return device_type == "cuda" or (accelerator is not None and device_type == accelerator.type)
