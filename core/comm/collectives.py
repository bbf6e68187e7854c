"""Collectives, each recorded (`record`) under the name ``what``, and the memory that they read and write.

`reduce_scatter`, `all_gather` and `all_reduce` take flat buffers, 1-D and contiguous, and the fastest way of each
backend: NCCL's collectives are called as they are, and under gloo ranks exchange pieces directly (`gloo`). They return
when the result may be used: on CPU when it is in memory, on CUDA when the current stream waits for it. `lane` runs any
of them while the rank computes.

Functions ``*_by_backend`` are torch's collectives on tensors of any shape: activations, batches and a few numbers.
With `async_op` they return at once, and the result may be used after ``wait()``. While a graph is compiled nothing of
them is recorded: the graph would have to break for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..base._torch_compat import all_gather_single, reduce_scatter_single
from ..base.device import Seam
from ..base.errors import warn_once
from ..base.host_memory import transient_memory
from . import gloo
from .call import message_tag
from .gloo import EXCHANGE_TAG, Sum, add_in_tree, store
from .message_formats import MessageFormat
from .messages import as_message, write_back
from .record import recorded


def all_reduce_by_backend(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    *,
    what: str,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """All-reduces `tensor` in place. `op` defaults to the sum.

    Args:
        group: None means all ranks.
        what: the payload as messages name it.

    Raises:
        OutOfStepError: other ranks did not join; with `async_op`, when it is waited for.
        ValueError: `async_op` for a tensor that is not contiguous, which has to be copied afterwards.
    """
    message = tensor.contiguous()
    if async_op and message is not tensor:
        raise ValueError(f"an asynchronous all-reduce of {what} needs a contiguous tensor; got {tensor.stride()}")
    work = _run("all-reduce", what, tensor, group, lambda: dist.all_reduce(message, op, group, async_op))
    write_back(tensor, message)
    return work


def all_gather_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> dist.Work | None:
    """Gathers `[n, ...]` of every rank into `output`, `[ranks * n, ...]`. Else as :func:`all_reduce_by_backend`."""
    target, own = as_message(output) if output.is_contiguous() else output, as_message(input_)
    return _run("all-gather", what, output, group, lambda: all_gather_single(target, own, group, async_op))


def reduce_scatter_by_backend(
    output: Tensor, input_: Tensor, group: ProcessGroup, *, what: str, async_op: bool = False
) -> dist.Work | None:
    """Sums `[ranks * n, ...]` over ranks, and leaves this rank its `[n, ...]` in `output`. Else as
    :func:`all_reduce_by_backend`."""
    return _run("reduce-scatter", what, input_, group, lambda: reduce_scatter_single(output, input_, group, async_op))


def all_to_all_by_backend(
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    *,
    what: str,
    sizes: tuple[list[int], list[int]] | tuple[None, None] = (None, None),
    async_op: bool = False,
) -> dist.Work | None:
    """Sends the `r`-th part of dim 0 to rank `r`. Else as :func:`all_reduce_by_backend`.

    Args:
        sizes: lengths of the parts of `output` and of `input_`, by rank; by default all are equal.
    """
    return _run(
        *("all-to-all", what, input_, group),
        lambda: dist.all_to_all_single(output, input_, sizes[0], sizes[1], group, async_op),
    )


def broadcast_by_backend(tensor: Tensor, group: ProcessGroup | None = None, *, what: str) -> None:
    """Overwrites `tensor`, of any layout and dtype, with the group's first rank's tensor.

    Raises:
        OutOfStepError: other ranks did not join.
        ShardstackError: as `write_back` does.
    """
    message = as_message(tensor)
    _run("broadcast", what, tensor, group, lambda: dist.broadcast(message, group=group, group_src=0))
    write_back(tensor, message)


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: ProcessGroup | None = None,
    *,
    what: str,
    copies: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Sends tensors to ranks of the group and receives others, and returns when both are done.

    Messages between two ranks match in their order. Every rank of the group calls it, also one with nothing to send
    or receive.

    Args:
        sends: tensors, each with the rank in the group that gets it.
        receives: tensors to fill, each with the rank that sends it.
        copies: targets and values on this rank, which are copied meanwhile.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    if not (dist.is_initialized() and dist.get_world_size(group) > 1):
        for target, values in copies:
            target.copy_(values)
        return
    group = group or dist.group.WORLD
    payload = next((tensor for tensor, _ in (*receives, *sends)), torch.empty(0))
    with recorded("exchange", what, payload, group):
        tag = message_tag(EXCHANGE_TAG)
        messages = [as_message(tensor) for tensor, _ in receives]
        calls = [
            dist.P2POp(dist.irecv, message, group=group, group_peer=rank, tag=tag)
            for message, (_, rank) in zip(messages, receives, strict=True)
        ]
        calls += [dist.P2POp(dist.isend, as_message(t), group=group, group_peer=rank, tag=tag) for t, rank in sends]
        works = dist.batch_isend_irecv(calls) if calls else ()
        for target, values in copies:
            target.copy_(values)
        for work in works:
            work.wait()
        for message, (tensor, _) in zip(messages, receives, strict=True):
            write_back(tensor, message)


def _run(
    kind: str, what: str, payload: Tensor, group: ProcessGroup | None, start: Callable[[], dist.Work | None]
) -> dist.Work | None:
    if torch.compiler.is_compiling():
        return start()
    return recorded(kind, what, payload, group).run(start)


SKIPS_GROUPS_OF_ONE: Seam[bool] = Seam(True)
"""Whether a rank that is alone in its group calls no backend. Tests set it to False, to run the calls of several ranks
on one GPU."""


def reduce_scatter(output: Tensor, input_: Tensor, group: ProcessGroup, how: Sum | None = None, *, what: str) -> None:
    """Sums `input_` over ranks. Rank `r` of `n` gets the `r`-th of `n` equal parts of the sum.

    Under gloo, and with an order, ranks are added in a tree (`add_in_tree`).

    Args:
        output: `[len(input_) / n]`; may be this rank's part of `input_`.
        input_: this rank's addend, `[n * len(output)]`. Only this rank's part of it may be overwritten.
        how: None means the plain sum.
        what: the payload as messages name it, for example ``"the gradients of bucket a to b"``.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    how = how or Sum()
    if how.sent_as is not None and not is_alone(group):
        _add_messages(output, how.sent_as.encode(input_), group, how, what)
        return
    with recorded("reduce-scatter", what, input_, group):
        _reduce_scatter(output, input_, group, how)


def all_gather(
    output: Tensor, input_: Tensor, group: ProcessGroup, sent_as: MessageFormat | None = None, *, what: str
) -> None:
    """Puts rank `r`'s `input_` into the `r`-th of `n` equal parts of `output`, on every rank.

    Args:
        output: `[n * len(input_)]`.
        input_: this rank's part. The gather is in place if this is a view of `output`.
        sent_as: how the parts travel. Every rank has what was decoded of them, of its own too.
        what: the payload as messages name it.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    if sent_as is not None:
        sent_as.gather(output, input_, group.size(), partial(all_gather, group=group, what=what))
        return
    with recorded("all-gather", what, output, group):
        _all_gather(output, input_, group)


def all_reduce(tensor: Tensor, group: ProcessGroup, how: Sum | None = None, *, what: str) -> None:
    """Replaces `tensor` with its sum (or mean, see `reduce_scatter`) over ranks, bitwise equal on all of them.

    Under gloo, and with an order, each element is added as in `reduce_scatter`, at any length:
    every rank adds the remainder that does not divide by the number of ranks. With a format its length has to divide,
    and the sums travel in their dtype.

    Raises:
        OutOfStepError: other ranks did not join.
    """
    size, how = group.size(), how or Sum()
    if how.sent_as is not None and not is_alone(group):
        own = tensor.chunk(size)[group.rank()]
        reduce_scatter(own, tensor, group, how, what=what)
        all_gather(tensor, own, group, what=what)
        return
    adds_itself = _exchanges_directly(group, tensor) or how.order is not None
    with recorded("all-reduce", what, tensor, group):
        if is_alone(group) or not adds_itself:
            if not is_alone(group):
                how = _for_backend(how, group, tensor)
                dist.all_reduce(tensor, how.op, group=group)
            store(tensor, tensor, how.scale, accumulate=False)
            return
        num_shared = len(tensor) - len(tensor) % size
        if num_shared:
            shared = tensor[:num_shared]
            own = shared.chunk(size)[group.rank()]
            _reduce_scatter(own, shared, group, how)
            _all_gather(shared, own, group)
        if num_shared < len(tensor):  # gathers a few elements and adds them on every rank
            rest, how = tensor[num_shared:], how.without_mean(size)
            addends = rest.new_empty(size * len(rest))
            _all_gather(addends, rest, group)
            store(rest, add_in_tree(addends.chunk(size), None, how.order), how.scale, accumulate=False)


def is_alone(group: ProcessGroup) -> bool:
    """Returns whether collectives of a group call no backend, because it has one rank."""
    return group.size() == 1 and SKIPS_GROUPS_OF_ONE.value


def _exchanges_directly(group: ProcessGroup, tensor: Tensor) -> bool:
    return group.size() > 1 and gloo.exchanges_directly(group, tensor.device)


def _for_backend(how: Sum, group: ProcessGroup, tensor: Tensor) -> Sum:
    """Returns the sum as the backend can add it. Gloo has no AVG."""
    return how.without_mean(group.size()) if gloo.is_gloo(group, tensor.device) else how


def _reduce_scatter(output: Tensor, input_: Tensor, group: ProcessGroup, how: Sum) -> None:
    if not len(input_):
        return
    if is_alone(group):
        store(output, input_, how.scale, how.accumulate)
    elif _exchanges_directly(group, input_):
        gloo.exchange_and_add(output, input_, group, how)
    elif how.order is not None:
        how, addends = how.without_mean(group.size()), torch.empty_like(input_)
        dist.all_to_all_single(addends, input_, group=group)
        store(output, add_in_tree(addends.chunk(group.size()), None, how.order), how.scale, how.accumulate)
    else:
        how, target = _for_backend(how, group, input_), torch.empty_like(output) if how.accumulate else output
        reduce_scatter_single(target, input_, group, op=how.op)
        store(output, target, how.scale, how.accumulate)


def _add_messages(output: Tensor, messages: Tensor, group: ProcessGroup, how: Sum, what: str) -> None:
    """Adds the addends of all ranks in fp32, as `add_in_tree` does.

    Args:
        messages: this rank's addend as it is sent: one message for each rank.
    """
    received, how = torch.empty_like(messages), how.without_mean(group.size())
    with recorded("reduce-scatter", what, messages, group):
        dist.all_to_all_single(received, messages, group=group)
    sums: list[Tensor] = []  # of as many ranks as the bits of the number of ranks so far say, so that few are kept
    for rank, message in enumerate(received.chunk(group.size()), 1):
        sums.append(torch.empty(len(output), device=messages.device))
        how.sent_as.decode(message, sums[-1])  # type: ignore[union-attr]
        is_last = rank == group.size()
        while len(sums) > 1 and (is_last or len(sums) > rank.bit_count()):
            last = sums.pop()
            sums[-1].add_(last)
    store(output, sums[0], how.scale, how.accumulate)


def _all_gather(output: Tensor, input_: Tensor, group: ProcessGroup) -> None:
    if not len(output):
        return
    if _exchanges_directly(group, output):
        gloo.start_all_gather(output, input_, group).wait()
    else:
        all_gather_single(as_message(output), as_message(input_), group)


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns `[numel]` uninitialised elements, given the number, dtype and device."""


def can_register(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether the group's backend allocates memory itself, which it then need not copy. Warns where not."""
    is_supported: bool = group._get_backend(device).supports_tensor_alloc(device)
    if not is_supported:
        warn_once(
            f"nccl_ub is set, but the backend of these ranks on {device.type} cannot register memory; it is allocated "
            "as usual. No number changes"
        )
    return is_supported


def allocator(group: ProcessGroup, device: torch.device, *, registers: bool) -> Allocate:
    """Returns the allocator for buffers of a group's collectives. Every rank of the group calls it.

    Args:
        registers: from the backend, where it can (`can_register`).
    """
    if not (registers and can_register(group, device)):
        return transient_memory
    # NCCL registers memory with a communicator, which exists from the group's first collective on that device.
    all_reduce_by_backend(torch.zeros(1, device=device), group, what="a warm-up of the connection")

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
        return memory

    return allocate
