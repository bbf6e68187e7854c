"""Collectives of FSDP2 under gloo: direct exchanges between ranks, in place of gloo's own.

See `comm.gloo` for the exchange; here it is fitted to the interfaces that FSDP2 takes. `recorded_collectives`
records the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...comm import collectives, gloo
from ...comm.collectives import What
from ...comm.lane import Handle, comm_lane
from ...comm.sums import SumOrder

_LEAST_BYTES_ALONE = 64 * 2**10
"""Smaller shards, such as those of norms, share a message: what each costs is then more than a copy."""


class _Allocation:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DirectAllGather(_Allocation, AllGather):
    """`gloo.start_all_gather`, without waiting for it where FSDP2 asks for that."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self.gather_each([output_tensor], [input_tensor], group)
        if async_op:
            return work
        work.wait()
        return None

    def gather_each(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> dist.Work:
        """Starts to gather several tensors (`gloo.start_all_gather`), the small ones in one message."""
        messages: list[dist.Work] = []
        small: list[int] = []
        for index, (output, input_) in enumerate(zip(outputs, inputs, strict=True)):
            if input_.nbytes < _LEAST_BYTES_ALONE and len(outputs) > 1:
                small.append(index)
            else:
                messages += gloo.start_all_gather(output, input_, group)
        if not small:
            return _Messages(messages, inputs)
        own = torch.cat([inputs[index].view(torch.uint8) for index in small])
        together = own.new_empty(group.size(), len(own))
        messages += gloo.start_all_gather(together.view(-1), own, group)
        parts = [outputs[index].view(torch.uint8).view(group.size(), -1) for index in small]
        return _Messages(messages, inputs, together, parts)


_MOST_REDUCTIONS_UNDER_WAY = 2
"""Reductions that run at once: each holds the whole gradients of a unit."""


class ReductionsUnderWay:
    """Reductions of one model's gradients that run while its backward computes; all of its units share it."""

    def __init__(self) -> None:
        # Those that were started and not waited for, the oldest first. `run` adds, on autograd's thread; `finish`
        # empties it, at the latest when the backward ends.
        self._handles: list[Handle] = []
        # Whether a reduction that is called now may end later: set and cleared by `begun_inside`.
        self._may_end_later = False

    @contextmanager
    def begun_inside(self) -> Iterator[None]:
        """Lets reductions that are called inside run on, until `finish`."""
        self._may_end_later = True
        try:
            yield
        finally:
            self._may_end_later = False

    def run(self, reduce: Callable[[], None], device: torch.device) -> None:
        """Runs a reduction, or starts it."""
        if not self._may_end_later:
            reduce()
            return
        if len(self._handles) >= _MOST_REDUCTIONS_UNDER_WAY:
            self._handles[-_MOST_REDUCTIONS_UNDER_WAY].wait()  # what they reduce is memory
        self._handles.append(comm_lane(device).submit(reduce))

    def finish(self) -> None:
        """Waits for all that run."""
        while self._handles:
            self._handles.pop(0).wait()


class DirectReduceScatter(_Allocation, ReduceScatter):
    """`collectives.reduce_scatter`; gradients are there when it returns, or when `reductions` are finished.

    Args:
        reductions: shared by all units of a model.
        order: how ranks are added; None: as the backend adds them.
    """

    def __init__(self, reductions: ReductionsUnderWay, order: SumOrder | None = None) -> None:
        self._reductions, self._order = reductions, order

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.reduce(output_tensor, input_tensor, group, op, what="gradients")
        return None

    def reduce(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        *,
        what: What,
    ) -> None:
        """Reduces as `__call__`, under a name or a record that has begun."""
        reduce = partial(collectives.reduce_scatter, output, input_, group, what=what, op=op, order=self._order)
        self._reductions.run(reduce, input_.device)


@contextmanager
def writing_beneath_autograd(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Writes into tensors without autograd's notice, to bring back what they held when a forward saved them."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(counted):  # type: ignore[attr-defined]
        yield


class _Messages(dist.Work):
    """Messages under way, as one piece of work.

    Args:
        messages: what is waited for.
        sent: tensors that are sent, kept until then.
        together: `[ranks, bytes]`, into which small tensors arrive side by side.
        parts: `[ranks, bytes of one]` each, views of the small tensors' own memory, which `wait` copies them into.
    """

    def __init__(
        self,
        messages: Sequence[dist.Work],
        sent: Sequence[torch.Tensor],
        together: torch.Tensor | None = None,
        parts: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        # The memory of a gather under way, owned here until `wait`, which drops all four; waiting again does nothing.
        self._messages, self._sent, self._together, self._parts = messages, sent, together, parts

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for message in self._messages:
            message.wait()
        if self._together is not None:
            sizes = [part.shape[1] for part in self._parts]
            with writing_beneath_autograd(self._parts):
                torch.split_with_sizes_copy(self._together, sizes, dim=1, out=list(self._parts))
        self._messages, self._sent, self._together, self._parts = (), (), None, ()
        return True
