"""A tensor-parallel rank's part of a whole tensor: copies, slices, and collectives along the first dimension."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import parallel_state
from ..base.errors import ParallelConfigError
from ..base.parameters import fill_range, kept_range
from ..comm.collectives import all_gather_by_backend, all_to_all_by_backend, reduce_scatter_by_backend
from ..comm.gloo import exchanges_directly
from .groups import Group, group_rank, group_size


def whole_shape(parameter: torch.Tensor, group: Group) -> list[int]:
    """Returns the whole model's shape of a parameter, before tensor parallelism (by its attributes) and sharding."""
    shape = list(parameter.shape)  # a DTensor's shape is that before sharding
    for dim, ranks in _cuts(parameter, group):
        shape[dim] *= group_size(ranks)
    return shape


def copy_partition(whole: torch.Tensor, parameter: torch.Tensor, group: Group) -> None:
    """Fills this rank's part from the whole model's tensor, in place and without communication."""
    for dim, ranks in _cuts(parameter, group):
        whole = whole.chunk(group_size(ranks), dim)[group_rank(ranks)]
    copy_shard(whole, parameter)


def _cuts(parameter: torch.Tensor, group: Group) -> Iterator[tuple[int, Group]]:
    """Yields the dims by which ranks share a parameter, by its attributes, and the ranks of each. `group` shares its
    matrices."""
    if getattr(parameter, "expert_model_parallel", False):
        yield 0, parallel_state.get_expert_model_parallel_group()
    if getattr(parameter, "tensor_model_parallel", False):
        yield parameter.partition_dim, group  # type: ignore[attr-defined]


def copy_shard(whole: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fills a parameter, or this rank's part of a sharded one, from one tensor-parallel rank's tensor `whole`."""
    if kept_range(parameter) is not None:
        fill_range(parameter, whole)
    elif isinstance(parameter, DTensor):
        # Without a source rank every rank shards its own copy.
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sharded.to_local())
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


def gather_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gathers `[n, ...]` of every rank into one `[tp * n, ...]`.

    Args:
        what: the payload as messages name it.
        async_op: return work; the result is valid once it is waited for.
    """
    whole = tensor.new_empty(tensor.shape[0] * group_size(group), *tensor.shape[1:])
    return whole, all_gather_by_backend(whole, tensor.contiguous(), group, what=what, async_op=async_op)


def reduce_scatter_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Reduces `[n, ...]` over ranks to this rank's `[n / tp, ...]`, with the arguments of :func:`gather_first_dim`.

    gloo implements reduce-scatter as an all-reduce, which sends twice the bytes. There each rank sends parts to their
    owners, which add them in rank order.

    Raises:
        ParallelConfigError: the ranks do not divide dim 0.
    """
    size = group_size(group)
    check_divides(tensor, 0, size)
    part = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    if not exchanges_directly(group, tensor.device):
        return part, reduce_scatter_by_backend(part, tensor.contiguous(), group, what=what, async_op=async_op)
    received = tensor.new_empty(tensor.shape)
    work = all_to_all_by_backend(received, tensor.contiguous(), group, what=what, async_op=async_op)
    adding = _SumOnWait(work, received.view(size, *part.shape), part)
    if async_op:
        return part, adding
    adding.wait()
    return part, None


class _SumOnWait(dist.Work):
    """Sums the parts of all ranks, `[ranks, ...]`, once they have arrived."""

    def __init__(self, arriving: dist.Work | None, parts: torch.Tensor, total: torch.Tensor) -> None:
        super().__init__()
        # Work that receives `parts`, None if they are there; and the output, which `wait` fills. Fixed.
        self.arriving, self.parts, self.total = arriving, parts, total

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.arriving is not None:
            self.arriving.wait()
        torch.sum(self.parts, 0, out=self.total)
        return True
