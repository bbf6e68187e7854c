"""Reduce-scatter, all-gather and all-reduce on flat buffers, each as its backend does it best.

NCCL has them. gloo has them too, but its reduce-scatter is an all-reduce inside, twice the bytes, and its all-gather
goes through a copy of the whole result. Under gloo ranks therefore send their pieces directly to whom they belong,
from and into the buffers where they lie, and add what they receive in rank order, a piece of a few megabytes at a
time: ``(n - 1) / n`` of the buffer leaves each rank, as in an ideal ring, with 8 MiB of scratch memory, which is kept.

Every function returns when the result may be used: on CPU when it is there, on CUDA when the current stream is
ordered behind it. `comm_lane` makes any of them run beside the computation. Buffers are 1-D and contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .._torch_compat import all_gather_single, reduce_scatter_single
from .explain.collective_record import message_tag

CHUNK_BYTES, LEAST_CHUNK_BYTES = 4 * 2**20, 2**18
"""What one message of a reduction carries: small enough to be added while it lies in the cache, and the smaller the
more ranks send at a time, so that what arrives takes no more memory in a larger group."""

REDUCE_TAG, GATHER_TAG = 0x5A4D, 0x5A4E
"""Of this file's messages alone, so that nobody's send or receive is taken for one of ours."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def reduce_scatter(
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    *,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    scale: float = 1.0,
    fp32_accumulation: bool = False,
    accumulate: bool = False,
) -> None:
    """Adds `input_` over ranks; rank `r` of `n` gets the `r`-th of `n` equal parts of the sum.

    Args:
        output: `[len(input_) / n]`; it may be this rank's part of `input_` itself.
        input_: what this rank adds. The other parts are left as they are; this rank's own is scratch afterwards.
        op: SUM, or AVG, the mean; gloo, which has no mean, divides the sum.
        scale: the result is multiplied by it.
        fp32_accumulation: add fp16 and bf16 in fp32, rounding once.
        accumulate: add the result to what `output` holds; then it must not be a part of `input_`.
    """
    size = group.size()
    if not len(input_):
        return
    if size == 1:
        _store(output, input_, scale, accumulate)
    elif exchanges_directly(group, input_.device):
        scale = scale / size if op == ReduceOp.AVG else scale
        _exchange_and_add(output, input_, group, scale, fp32_accumulation, accumulate)
    elif fp32_accumulation and input_.dtype in _LOW_PRECISION:
        received = torch.empty_like(input_)
        dist.all_to_all_single(received, input_, group=group)
        total = _add_in_rank_order(received.chunk(size), received.new_empty(len(output), dtype=torch.float32))
        _store(output, total, scale / size if op == ReduceOp.AVG else scale, accumulate)
    else:
        target = torch.empty_like(output) if accumulate else output
        reduce_scatter_single(target, input_, group, op=op)
        _store(output, target, scale, accumulate)


def all_gather(output: Tensor, input_: Tensor, group: ProcessGroup) -> None:
    """Puts rank `r`'s `input_` into the `r`-th of `n` equal parts of `output`, on every rank.

    Args:
        output: `[n * len(input_)]`.
        input_: what this rank gives; in place where it is its own part of `output`.
    """
    if not len(output):
        return
    if exchanges_directly(group, output.device):
        _wait_for(start_all_gather(output, input_, group))
    else:
        all_gather_single(output, input_, group)


def start_all_gather(output: Tensor, input_: Tensor, group: ProcessGroup) -> list[dist.Work]:
    """The messages of an `all_gather` where ranks exchange directly: to be waited for before `output` is read."""
    own, parts = group.rank(), output.chunk(group.size())
    if parts[own].data_ptr() != input_.data_ptr():
        parts[own].copy_(input_)
    peers = _peers(group)
    receives = [_receive(parts[peer], peer, group, GATHER_TAG) for peer in reversed(peers)]
    return receives + [_send(parts[own], peer, group, GATHER_TAG) for peer in peers]


def all_reduce(
    tensor: Tensor,
    group: ProcessGroup,
    *,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    scale: float = 1.0,
    fp32_accumulation: bool = False,
) -> None:
    """Makes `tensor` the sum (or mean, see `reduce_scatter`) over ranks, in place, equal to the last bit on all.

    A length that the number of ranks does not divide is left to the backend, in whatever order that adds.
    """
    size = group.size()
    in_two_steps = exchanges_directly(group, tensor.device) or (fp32_accumulation and tensor.dtype in _LOW_PRECISION)
    if size > 1 and len(tensor) % size == 0 and in_two_steps:
        own = tensor.chunk(size)[group.rank()]
        reduce_scatter(own, tensor, group, op=op, scale=scale, fp32_accumulation=fp32_accumulation)
        all_gather(tensor, own, group)
        return
    if size > 1:
        dist.all_reduce(tensor, op, group=group)
    _store(tensor, tensor, scale, accumulate=False)


def _store(output: Tensor, result: Tensor, scale: float, accumulate: bool) -> None:
    if accumulate:
        output.add_(result, alpha=scale)
        return
    if output.data_ptr() != result.data_ptr():
        output.copy_(result)
    if scale != 1.0:
        output.mul_(scale)


# ---- gloo: pieces straight from one rank's buffer to another's


def exchanges_directly(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the functions here send pieces from rank to rank, because the backend is gloo."""
    return device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))


def _exchange_and_add(
    output: Tensor, input_: Tensor, group: ProcessGroup, scale: float, fp32_accumulation: bool, accumulate: bool
) -> None:
    peers = _peers(group)
    message_bytes = max(CHUNK_BYTES // len(peers), LEAST_CHUNK_BYTES)
    chunk = min(len(output), message_bytes // input_.element_size())
    with _inbox_memory(2 * len(peers) * chunk * input_.element_size()) as memory:
        inboxes = memory.view(input_.dtype).view(2, len(peers), chunk)  # one fills while the other is added
        _exchange_through(inboxes, output, input_, group, scale, fp32_accumulation, accumulate)


_idle_inboxes: list[Tensor] = []
"""Memory of the last exchange, for the next; empty while one is under way."""


@contextmanager
def _inbox_memory(num_bytes: int) -> Iterator[Tensor]:
    """Bytes to receive into, `[num_bytes]`, the same ones each time.

    Allocated anew for each exchange they would come from the arena that the C allocator keeps for the lane's thread,
    and cost more memory than they have: it grows beside what the main thread has freed.
    """
    try:
        memory = _idle_inboxes.pop()
    except IndexError:  # the first, or another thread has it
        memory = torch.empty(0, dtype=torch.uint8)
    if len(memory) < num_bytes:
        with torch.inference_mode(False):  # else it could be used in no other mode
            memory = torch.empty(num_bytes, dtype=torch.uint8)
    yield memory[:num_bytes]
    _idle_inboxes[:] = [memory]  # not after an error, when messages may still arrive in it


def _exchange_through(
    inboxes: Tensor,
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    scale: float,
    fp32_accumulation: bool,
    accumulate: bool,
) -> None:
    """Sends the others their parts and adds what they send, through `inboxes` `[2, n - 1, elements of a message]`."""
    own, parts, peers, chunk = group.rank(), input_.chunk(group.size()), _peers(group), inboxes.size(-1)
    in_fp32 = fp32_accumulation and input_.dtype in _LOW_PRECISION
    totals = input_.new_empty(chunk, dtype=torch.float32) if in_fp32 else None
    sends: list[dist.Work] = []

    def post(start: int, inbox: Tensor) -> tuple[list[dist.Work], dict[int, Tensor]]:
        stop = min(start + chunk, len(output))
        incoming = {peer: inbox[index, : stop - start] for index, peer in enumerate(peers)}
        receives = [_receive(incoming[peer], peer, group, REDUCE_TAG) for peer in reversed(peers)]
        sends.extend(_send(parts[peer][start:stop], peer, group, REDUCE_TAG) for peer in peers)
        return receives, incoming

    starts = range(0, len(output), chunk)
    posted = post(0, inboxes[0])
    for index, start in enumerate(starts):
        receives, incoming = posted
        if index + 1 < len(starts):
            posted = post(starts[index + 1], inboxes[(index + 1) % 2])
        _wait_for(receives)
        length = min(chunk, len(output) - start)
        target = output[start : start + length]
        addends = [incoming[r] if r != own else parts[own][start : start + length] for r in range(group.size())]
        if totals is not None:
            total: Tensor | None = totals[:length]
        else:
            total = None if accumulate else target
        _store(target, _add_in_rank_order(addends, total), scale, accumulate)
    _wait_for(sends)


def _add_in_rank_order(addends: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``((a0 + a1) + a2) + ...`` into `out`, which may be one of the addends, with the first addend as scratch.

    An `out` of another dtype sets the precision of every addition; without one the sum is left in the first addend.
    """
    if out is not None and out.dtype != addends[0].dtype:
        total = out.copy_(addends[0])
        for addend in addends[1:]:
            total.add_(addend)
        return total
    total = addends[0]
    for addend in addends[1:-1]:
        total.add_(addend)
    return torch.add(total, addends[-1], out=total if out is None else out)


def _peers(group: ProcessGroup) -> list[int]:
    """The other ranks, each rank beginning with its successor, so that not all send to the same one first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _send(tensor: Tensor, peer: int, group: ProcessGroup, tag: int) -> dist.Work:
    return _started(dist.isend(tensor, group=group, group_dst=peer, tag=message_tag(tag)))


def _receive(tensor: Tensor, peer: int, group: ProcessGroup, tag: int) -> dist.Work:
    return _started(dist.irecv(tensor, group=group, group_src=peer, tag=message_tag(tag)))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the process group that it was asked to send in")
    return work


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
