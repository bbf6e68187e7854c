"""Reduce-scatter, all-gather and all-reduce on flat buffers, each as its backend does it best.

NCCL's own are used as they are. Under gloo ranks exchange pieces directly (`gloo`). Every function records itself
(`record`) under the name ``what``, and returns when the result may be used: on CPU when it is there, on CUDA when the
current stream is ordered behind it. `lane` makes any of them run while the rank computes. Buffers are 1-D and
contiguous.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .._torch_compat import all_gather_single, reduce_scatter_single
from . import gloo
from .record import Collective, recorded
from .sums import add_in_rank_order, store

What = str | Collective
"""What a collective carries, in the words of a message; or its record, where the caller has begun one."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def reduce_scatter(
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    *,
    what: What,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    scale: float = 1.0,
    fp32_accumulation: bool = False,
    accumulate: bool = False,
) -> None:
    """Adds `input_` over ranks; rank `r` of `n` gets the `r`-th of `n` equal parts of the sum.

    Args:
        output: `[len(input_) / n]`; it may be this rank's part of `input_` itself.
        input_: what this rank adds. The other parts are left as they are; this rank's own is scratch afterwards.
        what: its name for messages, as ``"the gradients of bucket a to b"``.
        op: SUM, or AVG, the mean; gloo, which has no mean, divides the sum.
        scale: the result is multiplied by it.
        fp32_accumulation: add fp16 and bf16 in fp32, rounding once.
        accumulate: add the result to what `output` holds; then it must not be a part of `input_`.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    with _recorded("reduce-scatter", what, input_, group):
        _reduce_scatter(output, input_, group, op, scale, fp32_accumulation, accumulate)


def all_gather(output: Tensor, input_: Tensor, group: ProcessGroup, *, what: What) -> None:
    """Puts rank `r`'s `input_` into the `r`-th of `n` equal parts of `output`, on every rank.

    Args:
        output: `[n * len(input_)]`.
        input_: what this rank gives; in place where it is its own part of `output`.
        what: its name for messages.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    with _recorded("all-gather", what, output, group):
        _all_gather(output, input_, group)


def all_reduce(
    tensor: Tensor,
    group: ProcessGroup,
    *,
    what: What,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    scale: float = 1.0,
    fp32_accumulation: bool = False,
) -> None:
    """Makes `tensor` the sum (or mean, see `reduce_scatter`) over ranks, in place, equal to the last bit on all.

    Under gloo, and with `fp32_accumulation`, each element is added in rank order, as `reduce_scatter` does, at any
    length: elements that ranks cannot share equally, fewer than there are ranks, are added by all of them.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    size = group.size()
    in_two_steps = gloo.exchanges_directly(group, tensor.device) or (
        fp32_accumulation and tensor.dtype in _LOW_PRECISION
    )
    with _recorded("all-reduce", what, tensor, group):
        if size == 1 or not in_two_steps:
            if size > 1:
                dist.all_reduce(tensor, op, group=group)
            store(tensor, tensor, scale, accumulate=False)
            return
        num_shared = len(tensor) - len(tensor) % size
        if num_shared:
            shared = tensor[:num_shared]
            own = shared.chunk(size)[group.rank()]
            _reduce_scatter(own, shared, group, op, scale, fp32_accumulation, accumulate=False)
            _all_gather(shared, own, group)
        if num_shared < len(tensor):
            _add_on_every_rank(tensor[num_shared:], group, op, scale, fp32_accumulation)


def all_reduce_by_backend(
    tensor: Tensor, group: ProcessGroup | None = None, *, what: What, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> None:
    """Torch's own all-reduce of a tensor of any shape: for a few numbers, where only their latency counts.

    Args:
        group: the ranks; all of them by default.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    with _recorded("all-reduce", what, tensor, group):
        dist.all_reduce(tensor, op, group=group)


def _recorded(kind: str, what: What, payload: Tensor, group: ProcessGroup | None) -> Collective:
    return what if isinstance(what, Collective) else recorded(kind, what, payload, group)


def _add_on_every_rank(
    tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType, scale: float, fp32_accumulation: bool
) -> None:
    """An all-reduce of a few elements, in rank order."""
    addends = tensor.new_empty(group.size() * len(tensor))
    _all_gather(addends, tensor, group)
    in_fp32 = fp32_accumulation and tensor.dtype in _LOW_PRECISION
    out = torch.empty_like(tensor, dtype=torch.float32) if in_fp32 else None
    total = add_in_rank_order(addends.chunk(group.size()), out)
    store(tensor, total, scale / group.size() if op == ReduceOp.AVG else scale, accumulate=False)


def _reduce_scatter(
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    op: ReduceOp.RedOpType,
    scale: float,
    fp32_accumulation: bool,
    accumulate: bool,
) -> None:
    size = group.size()
    in_fp32 = fp32_accumulation and input_.dtype in _LOW_PRECISION
    if not len(input_):
        return
    if size == 1:
        store(output, input_, scale, accumulate)
    elif gloo.exchanges_directly(group, input_.device):
        scale = scale / size if op == ReduceOp.AVG else scale
        gloo.exchange_and_add(output, input_, group, scale=scale, accumulate=accumulate, in_fp32=in_fp32)
    elif in_fp32:
        received = torch.empty_like(input_)
        dist.all_to_all_single(received, input_, group=group)
        total = add_in_rank_order(received.chunk(size), received.new_empty(len(output), dtype=torch.float32))
        store(output, total, scale / size if op == ReduceOp.AVG else scale, accumulate)
    else:
        target = torch.empty_like(output) if accumulate else output
        reduce_scatter_single(target, input_, group, op=op)
        store(output, target, scale, accumulate)


def _all_gather(output: Tensor, input_: Tensor, group: ProcessGroup) -> None:
    if not len(output):
        return
    if gloo.exchanges_directly(group, output.device):
        gloo.wait_for(gloo.start_all_gather(output, input_, group))
    else:
        all_gather_single(output, input_, group)
