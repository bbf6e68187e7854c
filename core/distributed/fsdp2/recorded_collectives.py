"""Records FSDP2's collectives under the names of their units, whichever implementation carries them.

A recorder is an instance of what it records: torch lets its own implementations be exchanged for those on buffers of
NCCL or on symmetric memory, and refuses that for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...comm.call import Collective
from ...comm.record import recorded
from .direct_collectives import DirectAllGather, DirectReduceScatter
from .torch_private import communication_of


def record_fsdp_collectives(root: nn.Module) -> None:
    """Puts a record around what each FSDP module of a model gathers and reduces with; leaves alone what has one.

    To be called again after an implementation was exchanged.
    """
    for name, module in root.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        communication = communication_of(module)
        if communication is None:
            continue  # without parameters of its own, or in one unit with a module before it
        unit = f"unit {name}" if name else "the root unit"
        gather, reduce = communication
        if not isinstance(gather, _Recorded):
            gather_kind = _RecordedGatherOfEach if isinstance(gather, DirectAllGather) else _RecordedAllGather
            module.set_custom_all_gather(_recorder(gather_kind, gather, unit))
        if not isinstance(reduce, _Recorded):
            reduce_kind = _RecordedDirectReduce if isinstance(reduce, DirectReduceScatter) else _RecordedReduceScatter
            module.set_custom_reduce_scatter(_recorder(reduce_kind, reduce, unit))


def _recorder(kind: type[_Recorded], inner: Any, unit: str) -> Any:
    """Wraps `inner` in a recorder of `kind` that is an instance of the type of `inner` too."""
    made: Any = object.__new__(type(f"{kind.__name__}Of{type(inner).__name__}", (kind, type(inner)), {}))
    vars(made).update(vars(inner), _inner=inner, _unit=unit)
    return made


class _Recorded:
    """Calls what it records; `_recorder` makes it and sets both fields, for good."""

    _inner: Any
    """The all-gather or reduce-scatter that carries it out; the recorder has a copy of its attributes."""
    _unit: str
    """The unit's name in messages."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        allocated: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return allocated


class _RecordedAllGather(_Recorded, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = recorded("all-gather", f"the parameters of {self._unit}", output_tensor, group)
        with call:
            work = self._inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        return work if work is None else _RecordedWork(work, call)


class _RecordedGatherOfEach(_RecordedAllGather):
    def gather_each(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> dist.Work:
        num_bytes = sum(output.nbytes for output in outputs)
        call = recorded("all-gather", f"the parameters of {self._unit}", num_bytes, group)
        with call:
            work: dist.Work = self._inner.gather_each(outputs, inputs, group)
        return _RecordedWork(work, call)


class _RecordedReduceScatter(_Recorded, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = recorded("reduce-scatter", f"the gradients of {self._unit}", input_tensor, group)
        with call:
            work: dist.Work | None = self._inner(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )
        return work if work is None else _RecordedWork(work, call)


class _RecordedDirectReduce(_RecordedReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        # The reduction enters the record itself, on this thread or on the lane's, and may end after this returns.
        call = recorded("reduce-scatter", f"the gradients of {self._unit}", input_tensor, group)
        try:
            self._inner.reduce(output_tensor, input_tensor, group, op, what=call)
        except BaseException as error:  # its own, or that of a reduction before it
            call.explain(error)
            raise
        return None


class _RecordedWork(dist.Work):
    """Work whose end is recorded where it is waited for, and whose failure is explained."""

    def __init__(self, inner: dist.Work, call: Collective) -> None:
        super().__init__()
        self._inner, self._call = inner, call
        call.ended_at = None  # leaving the call's context has set it, when the work was only begun

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._call:
            return bool(self._inner.wait())
