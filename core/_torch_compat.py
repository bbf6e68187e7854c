"""The one place for what differs between the torch versions that `setup.py` admits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def all_gather_single(
    output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Gathers every rank's `input_` into `output`, along dim 0; torch before 2.13 has it under its older name."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, input_, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Sums `input_` over ranks, of which each keeps its part of dim 0; see :func:`all_gather_single` for the name."""
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(output, input_, group=group, async_op=async_op)
    return work


def forget_dtensor_layouts() -> None:
    """Clears DTensor's caches, which take a mesh for one of equal ranks whose process groups were destroyed."""
    cached: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(cached, "cache", cached).cache_clear()
    clear_native_cache = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # absent in older torch
    if clear_native_cache is not None:
        clear_native_cache()


def fsdp_param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 module's state: a list in newer torch, one group or None before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
