"""Torch's collectives on tensors of any shape, recorded: for activations, batches and a few numbers.

Every function records itself (`record`) under the name ``what``. With `async_op` it returns at once, and its result
may be used after `Pending.wait`. While a graph is compiled nothing is recorded: the graph would have to break for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .._torch_compat import all_gather_single, reduce_scatter_single
from .call import Collective
from .record import recorded


class Pending(Protocol):
    """A collective that may still run."""

    def wait(self) -> object:
        """Returns when its result may be used."""


def all_reduce_by_backend(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    *,
    what: str,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    async_op: bool = False,
) -> Pending | None:
    """Replaces `tensor` by its sum over ranks, or by what else `op` says.

    Args:
        group: None means all ranks.
        what: the payload as messages name it.

    Raises:
        OutOfStepError: other ranks did not join; with `async_op`, when it is waited for.
    """
    return _call("all-reduce", what, tensor, group, async_op, lambda: dist.all_reduce(tensor, op, group, async_op))


def all_gather_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> Pending | None:
    """Gathers `[n, ...]` of every rank into `output`, `[ranks * n, ...]`; else as :func:`all_reduce_by_backend`."""
    return _call(
        "all-gather", what, output, group, async_op, lambda: all_gather_single(output, input_, group, async_op)
    )


def reduce_scatter_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> Pending | None:
    """Sums `[ranks * n, ...]` over ranks, and leaves this rank its `[n, ...]` in `output`; else as
    :func:`all_reduce_by_backend`."""
    return _call(
        "reduce-scatter", what, input_, group, async_op, lambda: reduce_scatter_single(output, input_, group, async_op)
    )


def all_to_all_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> Pending | None:
    """Sends the `r`-th of equal parts of dim 0 to rank `r`; else as :func:`all_reduce_by_backend`."""
    return _call(
        *("all-to-all", what, input_, group, async_op),
        lambda: dist.all_to_all_single(output, input_, group=group, async_op=async_op),
    )


def broadcast_by_backend(tensor: Tensor, group: ProcessGroup | None = None, *, what: str) -> None:
    """Overwrites `tensor` with that of the group's first rank.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    _call("broadcast", what, tensor, group, False, lambda: dist.broadcast(tensor, group=group, group_src=0))


def _call(
    kind: str,
    what: str,
    payload: Tensor,
    group: ProcessGroup | None,
    async_op: bool,
    start: Callable[[], dist.Work | None],
) -> Pending | None:
    if torch.compiler.is_compiling():
        return start()
    call = recorded(kind, what, payload, group)
    if not async_op:
        with call:
            start()
        return None
    try:
        work = start()
    except BaseException as error:
        call.explain(error)
        raise
    return None if work is None else _Recorded(call, work)


class _Recorded:
    """An asynchronous collective, and its record."""

    def __init__(self, call: Collective, work: dist.Work) -> None:
        self._call, self._work = call, work

    def __del__(self) -> None:
        # Nobody waits for it any more, because an error came between: then it is under way no more either.
        if self._call.ended_at is None:
            self._call.has_failed = True

    def wait(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._call.explain(error)
            raise
        self._call.ended()
