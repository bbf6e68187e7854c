"""Collectives of FSDP2's units, recorded under the names of the units; under gloo, direct exchanges between ranks.

`comm.gloo` implements the exchange, and torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take it. Other
collectives, torch's or the user's, are wrapped in recorders. A unit that a part of the ranks keeps whole between
forward and backward (``reshard_after_forward`` as a number) is freed by torch as any other; its all-gather keeps the
part of this rank, and gathers the parts in backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ..._torch_compat import NO_BACKWARD, current_backward
from ...comm import collectives, gloo, streams
from ...comm.record import recorded
from ..groups import subgroup
from ..plan import Plan, UnitPlan
from .torch_private import as_fsdp, communication_of


def set_direct_collectives(plan: Plan, *, gathers: bool) -> None:
    """Makes every unit reduce by `comm.collectives`, in the plan's order of ranks.

    Args:
        gathers: units gather by direct exchange too.
    """
    for unit, module in units_of(plan):
        if gathers:
            module.set_custom_all_gather(DirectAllGather(unit_text(unit)))
        module.set_custom_reduce_scatter(DirectReduceScatter(unit_text(unit), plan))


def record_collectives(plan: Plan, parts: Mapping[str, KeptPart]) -> None:
    """Wraps each unit's collectives in recorders. Call it again after the user has replaced one.

    Args:
        parts: of the units that a part of the ranks keeps whole, from `kept_parts`.
    """
    for unit, module in units_of(plan):
        communication = communication_of(module)
        if communication is None:
            continue  # it has no parameters of its own
        gather, reduce = communication
        if not isinstance(gather, _RecordsItself):
            gather = _recorder(_RecordedAllGather, gather, unit_text(unit))
        if (part := parts.get(unit.names[0])) is not None and not isinstance(gather, _PartAllGather):
            gather = _recorder(_PartAllGather, gather, unit_text(unit))
            gather.part = part
        module.set_custom_all_gather(gather)
        if not isinstance(reduce, _RecordsItself):
            module.set_custom_reduce_scatter(_recorder(_RecordedReduceScatter, reduce, unit_text(unit)))


class KeptPart:
    """This rank's part of one unit, which `ranks` keep whole together between its forward and backward.

    Args:
        ranks: neighbours in the unit's group of shards; each keeps an equal part.
        outlasts_backward: keep the part for the next micro-batch, which finds the unit gathered.
    """

    def __init__(self, ranks: dist.ProcessGroup, *, outlasts_backward: bool) -> None:
        self.ranks, self._outlasts_backward = ranks, outlasts_backward
        # Memory of our own, on the stream that gathers. `keep` sets it when a forward has gathered the unit; `take`
        # clears it in backward, or `drop`, when shards may have changed.
        self.tensor: torch.Tensor | None = None
        # Behind the copy into `tensor`, which another stream may read; None on a CPU. Set with `tensor`.
        self._is_written: Any = None

    def keep(self, whole: torch.Tensor) -> None:
        """Keeps this rank's part of a unit that has been gathered."""
        self.tensor = whole.chunk(self.ranks.size())[self.ranks.rank()].clone()
        self._is_written = streams.record_event() if streams.is_asynchronous(whole.device) else None

    def take(self) -> torch.Tensor | None:
        """Returns the part, for a gather on the current stream; None if there is none."""
        part = self.tensor
        if part is not None and self._is_written is not None:
            streams.current_stream().wait_event(self._is_written)
            streams.used_on(part, streams.current_stream())
        if current_backward() != NO_BACKWARD and not self._outlasts_backward:
            self.tensor = None
        return part

    def drop(self) -> None:
        """Frees the part, because no backward follows or the shards have changed."""
        self.tensor = None


def kept_parts(plan: Plan) -> dict[str, KeptPart]:
    """Makes a `KeptPart` for each unit that is kept among a part of the ranks, by its name; every rank calls it."""
    neighbours = dict[tuple[bool, int], dist.ProcessGroup]()
    parts: dict[str, KeptPart] = {}
    for unit in plan.units:
        if (size := unit.kept_among) is not None:
            key = unit.holds_experts, size
            if key not in neighbours:
                group = plan.over_ranks_of(unit.holds_experts).groups.shard
                first = group.rank() // size * size
                neighbours[key] = subgroup(group, range(first, first + size))
            parts[unit.names[0]] = KeptPart(neighbours[key], outlasts_backward=unit.is_kept)
    return parts


def units_of(plan: Plan) -> Sequence[tuple[UnitPlan, FSDPModule]]:
    """Returns each unit and the first of its modules, which all share one state of FSDP2."""
    return [(unit, as_fsdp(unit.modules[0])) for unit in plan.units]


def unit_text(unit: UnitPlan) -> str:
    """Returns the name of a unit in messages."""
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
    """`gloo.start_all_gather`, without waiting for it where FSDP2 asks for that."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = recorded("all-gather", f"the parameters of {self.unit}", output_tensor, group)
        gather = partial(gloo.start_all_gather, output_tensor, input_tensor, group)
        work = cast(dist.Work, call.run(gather))
        if async_op:
            return work
        work.wait()
        return None


class DirectReduceScatter(_Direct, ReduceScatter):
    """`comm.collectives.reduce_scatter`, in the order of ranks of the plan."""

    def __init__(self, unit: str, plan: Plan) -> None:
        self.unit, self._order = unit, plan.sum_order

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        what = f"the gradients of {self.unit}"
        collectives.reduce_scatter(output_tensor, input_tensor, group, what=what, op=op, order=self._order)
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


class _PartAllGather(_Recorder, AllGather):
    part: KeptPart
    """This rank's part of the unit; fixed. `inner` gathers the unit where it is empty."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if (part := self.part.take()) is not None:
            tensors = {"output_tensor": output_tensor, "input_tensor": part}
            work: dist.Work | None = self.inner(**tensors, group=self.part.ranks, async_op=async_op)
            return work
        self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=False)
        if current_backward() == NO_BACKWARD:
            self.part.keep(output_tensor)
        return None


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
