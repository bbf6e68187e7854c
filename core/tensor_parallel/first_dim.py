"""All-gather and reduce-scatter along the first dimension of a tensor, over tensor-parallel ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.by_backend import (
    all_gather_by_backend,
    all_to_all_by_backend,
    reduce_scatter_by_backend,
)
from ..comm.gloo import exchanges_directly
from .groups import group_size
from .partition import check_divides


def gather_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gathers `[n, ...]` of every rank into one `[tp * n, ...]`; with `async_op`, valid once the work is waited
    for. `what` names the payload in messages."""
    whole = tensor.new_empty(tensor.shape[0] * group_size(group), *tensor.shape[1:])
    return whole, all_gather_by_backend(whole, tensor.contiguous(), group, what=what, async_op=async_op)


def reduce_scatter_first_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, what: str, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """Reduces `[n, ...]` over ranks to this rank's `[n / tp, ...]`; arguments as in :func:`gather_first_dim`.

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
        self.arriving, self.parts, self.total = arriving, parts, total

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.arriving is not None:
            self.arriving.wait()
        torch.sum(self.parts, 0, out=self.total)
        return True
