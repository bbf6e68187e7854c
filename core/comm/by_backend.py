"""Torch's collectives on tensors of any shape, recorded: for activations, batches and a few numbers.

Every function records itself (`record`) under the name ``what``. With `async_op` it returns at once, and its result
may be used after ``wait()``. While a graph is compiled nothing is recorded: the graph would have to break for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .._torch_compat import all_gather_single, reduce_scatter_single
from .record import recorded


def all_reduce_by_backend(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    *,
    what: str,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """All-reduces `tensor` in place; `op` defaults to the sum.

    Args:
        group: None means all ranks.
        what: the payload as messages name it.

    Raises:
        OutOfStepError: other ranks did not join; with `async_op`, when it is waited for.
    """
    return _run("all-reduce", what, tensor, group, lambda: dist.all_reduce(tensor, op, group, async_op))


def all_gather_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> dist.Work | None:
    """Gathers `[n, ...]` of every rank into `output`, `[ranks * n, ...]`; else as :func:`all_reduce_by_backend`."""
    return _run("all-gather", what, output, group, lambda: all_gather_single(output, input_, group, async_op))


def reduce_scatter_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> dist.Work | None:
    """Sums `[ranks * n, ...]` over ranks, and leaves this rank its `[n, ...]` in `output`; else as
    :func:`all_reduce_by_backend`."""
    return _run("reduce-scatter", what, input_, group, lambda: reduce_scatter_single(output, input_, group, async_op))


def all_to_all_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> dist.Work | None:
    """Sends the `r`-th of equal parts of dim 0 to rank `r`; else as :func:`all_reduce_by_backend`."""
    return _run(
        *("all-to-all", what, input_, group),
        lambda: dist.all_to_all_single(output, input_, group=group, async_op=async_op),
    )


def broadcast_by_backend(tensor: Tensor, group: ProcessGroup | None = None, *, what: str) -> None:
    """Overwrites `tensor` with that of the group's first rank.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    _run("broadcast", what, tensor, group, lambda: dist.broadcast(tensor, group=group, group_src=0))


def _run(
    kind: str, what: str, payload: Tensor, group: ProcessGroup | None, start: Callable[[], dist.Work | None]
) -> dist.Work | None:
    if torch.compiler.is_compiling():
        return start()
    return recorded(kind, what, payload, group).run(start)
