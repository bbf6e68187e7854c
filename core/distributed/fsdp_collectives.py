"""What FSDP2 gathers and reduces with under gloo: direct exchanges between ranks, in place of gloo's own collectives.

gloo's reduce-scatter is an all-reduce inside, twice the bytes, and its all-gather copies the whole result. See
`collectives` for the exchange; here it is fitted to the interfaces that FSDP2 takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from . import collectives


class _Allocation:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DirectAllGather(_Allocation, AllGather):
    """`collectives.start_all_gather`, beside the computation where FSDP2 asks for that."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        messages = collectives.start_all_gather(output_tensor, input_tensor, group)
        work = _Messages(messages, output_tensor)
        if async_op:
            return work
        work.wait()
        return None


class DirectReduceScatter(_Allocation, ReduceScatter):
    """`collectives.reduce_scatter`; gradients are there when it returns, which FSDP2 on CPU relies on."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        collectives.reduce_scatter(output_tensor, input_tensor, group, op=op)
        return None


class _Messages(dist.Work):
    """Messages under way, as one piece of work; `tensor`, into which they arrive, lives as long."""

    def __init__(self, messages: Sequence[dist.Work], tensor: torch.Tensor) -> None:
        super().__init__()
        self._messages = messages
        self._tensor = tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for message in self._messages:
            message.wait()
        self._messages = ()
        return True
