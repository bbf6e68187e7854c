"""Collectives of FSDP2's units, recorded under the names of the units; under gloo, direct exchanges between ranks.

`comm.gloo` implements the exchange, and torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take it. Other
collectives, torch's or the user's, are wrapped in recorders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...comm import collectives, gloo
from ...comm.record import recorded
from ..plan import Plan, UnitPlan
from .torch_private import PendingReductions, as_fsdp, communication_of, exchange_directly


def set_direct_collectives(plan: Plan, *, gathers: bool) -> None:
    """Makes every unit reduce by `comm.collectives`, in the plan's order of ranks.

    Args:
        gathers: units gather by direct exchange too, without torch's copies, and reduce while backward computes.
    """
    reductions = PendingReductions()
    for unit, module in _units(plan):
        if gathers:
            module.set_custom_all_gather(DirectAllGather(_name(unit)))
            exchange_directly(module, reductions)
        module.set_custom_reduce_scatter(DirectReduceScatter(_name(unit), reductions, plan))


def record_collectives(plan: Plan) -> None:
    """Wraps each unit's collectives in recorders. Call it again after the user has replaced one."""
    for unit, module in _units(plan):
        communication = communication_of(module)
        if communication is None:
            continue  # it has no parameters of its own
        gather, reduce = communication
        if not isinstance(gather, _RecordsItself):
            module.set_custom_all_gather(_recorder(_RecordedAllGather, gather, _name(unit)))
        if not isinstance(reduce, _RecordsItself):
            module.set_custom_reduce_scatter(_recorder(_RecordedReduceScatter, reduce, _name(unit)))


def _units(plan: Plan) -> Sequence[tuple[UnitPlan, FSDPModule]]:
    """Returns each unit and the first of its modules, which all share one state of FSDP2."""
    return [(unit, as_fsdp(unit.modules[0])) for unit in plan.units]


def _name(unit: UnitPlan) -> str:
    return f"unit {unit.names[0]}" if unit.names[0] else "the root unit"


class _RecordsItself:
    unit: str
    """The unit's name in messages; fixed."""


class _Direct(_RecordsItself):
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DirectAllGather(_Direct, AllGather):
    """`gloo.start_all_gathers`, without waiting for it where FSDP2 asks for that."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

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
        """Starts to gather several tensors, each into an output of its own."""
        num_bytes = sum(output.nbytes for output in outputs)
        call = recorded("all-gather", f"the parameters of {self.unit}", num_bytes, group)
        return cast(dist.Work, call.run(lambda: gloo.start_all_gathers(outputs, inputs, group)))


class DirectReduceScatter(_Direct, ReduceScatter):
    """`comm.collectives.reduce_scatter`. Its output is valid when it returns, or after ``reductions.finish()``.

    Args:
        reductions: shared by all units of a model.
        plan: says how ranks are added.
    """

    def __init__(self, unit: str, reductions: PendingReductions, plan: Plan) -> None:
        self.unit, self._reductions, self._order = unit, reductions, plan.sum_order

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        # The reduction enters the record itself, on this thread or on the lane's, and may end after this returns.
        call = recorded("reduce-scatter", f"the gradients of {self.unit}", input_tensor, group)
        reduce = partial(
            collectives.reduce_scatter, output_tensor, input_tensor, group, what=call, op=op, order=self._order
        )
        try:
            self._reductions.run(reduce, input_tensor.device)
        except BaseException as error:  # its own, or that of a reduction before it
            call.explain(error)
            raise
        return None


def _recorder(kind: type[_Recorder], inner: Any, unit: str) -> Any:
    """Wraps `inner` in a recorder of `kind` that is an instance of the type of `inner` too.

    Torch replaces only instances of its own classes by its versions on NCCL's buffers or symmetric memory, and refuses
    others, so the recorder is a subclass of the wrapped type too.
    """
    made: Any = object.__new__(type(f"{kind.__name__}Of{type(inner).__name__}", (kind, type(inner)), {}))
    vars(made).update(vars(inner), inner=inner, unit=unit)
    return made


class _Recorder(_RecordsItself):
    inner: Any
    """The all-gather or reduce-scatter that it calls; the recorder has a copy of its attributes."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        allocated: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return allocated


class _RecordedAllGather(_Recorder, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = recorded("all-gather", f"the parameters of {self.unit}", output_tensor, group)
        tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
        return call.run(partial(self.inner, **tensors, group=group, async_op=async_op))


class _RecordedReduceScatter(_Recorder, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = recorded("reduce-scatter", f"the gradients of {self.unit}", input_tensor, group)
        tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
        return call.run(partial(self.inner, **tensors, group=group, op=op, async_op=async_op))
