"""Exchanges pieces directly between ranks under gloo, the one fast path on CPU, and adds them.

gloo implements reduce-scatter as an all-reduce, which sends twice the bytes, and its all-gather copies the whole
result. Here each rank sends pieces straight to the ranks that own them, from and into the final buffers, and adds what
it receives in rank order, a few megabytes at a time. Each rank sends ``(n - 1) / n`` of the buffer, as in an ideal
ring, and keeps 8 MiB of scratch memory. `exchanges_directly` says whether this path applies; with
``SHARDSTACK_DIRECT_EXCHANGE=0``, set on every rank, gloo's own collectives are called instead, everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .call import FunctionWork, message_tag
from .message_formats import MessageFormat

SumOrder = Sequence[Sequence[int]]
"""Ranks of a group in groups of neighbours: each is added up in a tree, then the sums are. See `add_in_tree`."""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """How the addends of ranks are added, and the result is written."""

    op: ReduceOp.RedOpType = ReduceOp.SUM
    """SUM, or AVG for the mean. Where the backend does not add, and under gloo, the sum is divided."""
    scale: float = 1.0
    """Factor of the result."""
    accumulate: bool = False
    """Add the result to the output, which then must not be a part of the input."""
    order: SumOrder | None = None
    """Order of additions on any backend."""
    sent_as: MessageFormat | None = None
    """How the addend of each rank travels, its own too. Ranks are then added in fp32."""

    def without_mean(self, num_ranks: int) -> Sum:
        """Returns the sum with a factor in the place of AVG."""
        is_mean = self.op == ReduceOp.AVG
        return replace(self, op=ReduceOp.SUM, scale=self.scale / num_ranks) if is_mean else self


def store(output: Tensor, result: Tensor, scale: float, accumulate: bool) -> None:
    """Writes `result * scale` into `output`, or adds it with `accumulate`. Only without may both be one tensor."""
    if accumulate:
        output.add_(result, alpha=scale)
        return
    if output.data_ptr() != result.data_ptr():
        output.copy_(result)
    if scale != 1.0:
        output.mul_(scale)


def add_in_tree(addends: Sequence[Tensor], out: Tensor | None, order: SumOrder | None = None) -> Tensor:
    """Adds neighbours, then the sums of neighbours, ``(a0 + a1) + (a2 + a3)``, into `out`, which may be an addend.

    Each addition rounds to the addends' dtype. All addends are scratch; with `out` None the sum is left in one.

    Args:
        order: indices of addends, by groups that are added up by themselves first; None is all, in order.
    """
    if order is None:
        return _add_neighbours(addends, out)
    sums = [_add_neighbours([addends[index] for index in members], None) for members in order]
    return _add_neighbours(sums, out)


def _add_neighbours(addends: Sequence[Tensor], out: Tensor | None) -> Tensor:
    sums = list(addends)
    while len(sums) > 2:
        sums = [a.add_(b) for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) & ~1 :]
    if len(sums) == 2:
        return torch.add(sums[0], sums[1], out=sums[0] if out is None else out)
    return sums[0] if out is None else out.copy_(sums[0])


CHUNK_BYTES, LEAST_CHUNK_BYTES = 4 * 2**20, 2**18
"""Bytes of one message of a reduction, at most and at least. A message is small enough to be added while it is in the
cache. It shrinks as the group grows, so that the inboxes take the same memory in a group of any size."""

REDUCE_TAG, GATHER_TAG, EXCHANGE_TAG = 0x5A4D, 0x5A4E, 0x5A4F
"""Tags of the messages of this file and of `collectives.exchange`, so that no other send or receive matches them."""


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether the backend of a group for `device` is gloo."""
    return device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))


def exchanges_directly(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether ranks exchange pieces directly: under gloo, unless the environment says otherwise."""
    return is_gloo(group, device) and os.environ.get("SHARDSTACK_DIRECT_EXCHANGE", "1") != "0"


def start_all_gather(output: Tensor, input_: Tensor, group: ProcessGroup) -> dist.Work:
    """Starts to gather every rank's input into its part of the output. Wait for the work before reading it."""
    own, parts = group.rank(), output.chunk(group.size())
    if parts[own].data_ptr() != input_.data_ptr():
        parts[own].copy_(input_)
    peers = _peers(group)
    messages = [_receive(parts[peer], peer, group, GATHER_TAG) for peer in reversed(peers)]
    messages += [_send(parts[own], peer, group, GATHER_TAG) for peer in peers]

    def end(memory: Tensor = output) -> None:  # which the running gather owns
        while messages:  # after an error again: gloo would wait for ever for a message that has been waited for
            messages[0].wait()
            del messages[0]

    return FunctionWork(end)


def exchange_and_add(output: Tensor, input_: Tensor, group: ProcessGroup, how: Sum) -> None:
    """Implements `collectives.reduce_scatter`."""
    how = how.without_mean(group.size())
    own, parts, peers = group.rank(), input_.chunk(group.size()), _peers(group)
    message_bytes = max(CHUNK_BYTES // len(peers), LEAST_CHUNK_BYTES)
    chunk = min(len(output), message_bytes // input_.element_size())
    sends: list[dist.Work] = []  # all sends of this exchange, waited for at the end; `input_` must live until then

    def post(start: int, inbox: Tensor) -> tuple[list[dist.Work], dict[int, Tensor]]:
        stop = min(start + chunk, len(output))
        incoming = {peer: inbox[index, : stop - start] for index, peer in enumerate(peers)}
        receives = [_receive(incoming[peer], peer, group, REDUCE_TAG) for peer in reversed(peers)]
        sends.extend(_send(parts[peer][start:stop], peer, group, REDUCE_TAG) for peer in peers)
        return receives, incoming

    starts = range(0, len(output), chunk)
    with _inbox_memory(2 * len(peers) * chunk * input_.element_size()) as memory:
        inboxes = memory.view(input_.dtype).view(2, len(peers), chunk)  # one fills while the other is added
        next_messages = post(0, inboxes[0])
        for index, start in enumerate(starts):
            receives, incoming = next_messages
            if index + 1 < len(starts):
                next_messages = post(starts[index + 1], inboxes[(index + 1) % 2])
            _wait_for(receives)
            length = min(chunk, len(output) - start)
            target = output[start : start + length]
            addends = [incoming[r] if r != own else parts[own][start : start + length] for r in range(group.size())]
            total = add_in_tree(addends, None if how.accumulate else target, how.order)
            store(target, total, how.scale, how.accumulate)
        _wait_for(sends)


_idle_inboxes: list[Tensor] = []
"""Scratch memory kept from the last exchange for the next. Only `_inbox_memory` takes and returns it, on any thread.
Empty during an exchange and after one that failed."""


@contextmanager
def _inbox_memory(num_bytes: int) -> Iterator[Tensor]:
    """Lends `[num_bytes]` uint8 to receive into, the same memory each time.

    Memory allocated per exchange would come from the C allocator's arena of the lane's thread, which grows while the
    main thread's arena holds the same amount of free memory.
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


def _peers(group: ProcessGroup) -> list[int]:
    """Returns the other ranks, this rank's successor first, so that not all ranks send to the same one at once."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _send(tensor: Tensor, peer: int, group: ProcessGroup, tag: int) -> dist.Work:
    return _require(dist.isend(tensor, group=group, group_dst=peer, tag=message_tag(tag)))


def _receive(tensor: Tensor, peer: int, group: ProcessGroup, tag: int) -> dist.Work:
    return _require(dist.irecv(tensor, group=group, group_src=peer, tag=message_tag(tag)))


def _require(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the process group that it was asked to send in")
    return work


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
