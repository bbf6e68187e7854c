"""Memory that collectives read and write, from the process group's backend where it can register it (NCCL)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..host_memory import transient_memory
from ..warn import warn_once
from .by_backend import all_reduce_by_backend

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns `[numel]` uninitialised elements, given the number, dtype and device."""


def can_register(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether the group's backend allocates memory itself, which it then need not copy; warns where not."""
    found: bool = group._get_backend(device).supports_tensor_alloc(device)
    if not found:
        warn_once(
            f"nccl_ub is set, but the backend of these ranks on {device.type} cannot register memory; it is allocated "
            "as usual. No number changes"
        )
    return found


def allocator(group: ProcessGroup, device: torch.device, *, registers: bool) -> Allocate:
    """Returns the allocator for buffers of a group's collectives; every rank of the group calls it.

    Args:
        registers: from the backend, where it can (`can_register`).
    """
    if not (registers and can_register(group, device)):
        return transient_memory
    # NCCL registers memory with a communicator, which exists from the group's first collective on that device.
    all_reduce_by_backend(torch.zeros(1, device=device), group, what="nothing, to connect the ranks")

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made: Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
        return made

    return allocate
