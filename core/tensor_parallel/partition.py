"""Copies one tensor-parallel rank's part of a whole tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ParallelConfigError
from ..kept_ranges import fill_range, kept_range
from .groups import Group, group_rank, group_size


def whole_shape(parameter: torch.Tensor, group: Group) -> list[int]:
    """Returns the whole model's shape of a parameter, before tensor parallelism (by its attributes) and sharding."""
    shape = list(parameter.shape)  # a DTensor's shape is that before sharding
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group_size(group)  # type: ignore[attr-defined]
    return shape


def copy_partition(whole: torch.Tensor, parameter: torch.Tensor, group: Group) -> None:
    """Fills this rank's part from the whole model's tensor, in place; nothing is communicated."""
    if getattr(parameter, "tensor_model_parallel", False):
        whole = whole.chunk(group_size(group), parameter.partition_dim)[group_rank(group)]  # type: ignore[attr-defined]
    copy_shard(whole, parameter)


def copy_shard(whole: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fills a parameter, or this rank's part of a sharded one, from one tensor-parallel rank's tensor `whole`."""
    if kept_range(parameter) is not None:
        fill_range(parameter, whole)
    elif isinstance(parameter, DTensor):
        # Without a source rank every rank shards its own copy.
        own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(own.to_local())
    else:
        parameter.copy_(whole)


def rank_slice(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Returns this rank's part of `tensor` along `dim`, as a view.

    Raises:
        ParallelConfigError: the ranks do not divide it.
    """
    size = group_size(group)
    check_divides(tensor, dim, size)
    return tensor.chunk(size, dim)[group_rank(group)]


def check_divides(tensor: torch.Tensor, dim: int, size: int) -> None:
    """Raises ParallelConfigError if `size` ranks do not divide a dimension, the last one or the first."""
    length = tensor.shape[dim]
    if length % size:
        what, fix = "last dim", "choose a size that it divides"
        if dim == 0:
            what, fix = "sequence", f"pad the sequence to a multiple of {size}, or turn sequence_parallel off"
        raise ParallelConfigError(
            f"a {what} of {length} ({list(tensor.shape)}) cannot be split over {size} tensor-parallel ranks; {fix}"
        )
