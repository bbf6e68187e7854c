"""The collectives of FSDP2's units: by direct exchange under gloo, and recorded under the names of the units.

Torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take them. A unit that a part of the ranks keeps whole
between forward and backward (``reshard_after_forward`` as a number) is freed by torch as any other; its all-gather
keeps the part of this rank, and gathers the parts in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.device import current_device
from ...comm import collectives, gloo
from ...comm.record import recorded
from ..gathered_values import KeptPart
from ..groups import neighbour_groups
from ..plan import Plan, UnitPlan
from .torch_private import as_fsdp


def set_collectives(plan: Plan) -> list[KeptPart]:
    """Sets the collectives of every unit. Every rank calls it.

    Returns:
        the parts of the units that a part of the ranks keeps whole.
    """
    neighbours = neighbour_groups(plan.groups.shard, (unit.kept_among for unit in plan.units))
    parts: list[KeptPart] = []
    for unit in plan.units:
        module, part = as_fsdp(unit.modules[0]), None
        if unit.kept_among is not None:
            part = KeptPart(neighbours[unit.kept_among], outlasts_backward=unit.is_kept)
            parts.append(part)
        module.set_custom_all_gather(UnitAllGather(plan, unit, part))
        module.set_custom_reduce_scatter(UnitReduceScatter(plan, unit))
    return parts


class _UnitCollective:
    """What both collectives of a unit are made from. All fields are fixed.

    They are subclasses of torch's own, so that torch replaces them where a user calls ``set_symm_mem_for_comm`` or
    ``set_allocate_memory_from_process_group_for_comm``; calls are then not recorded.
    """

    def __init__(self, plan: Plan, unit: UnitPlan) -> None:
        self.unit = f"unit {unit.names[0]}" if unit.names[0] else "the root unit"
        plan = plan.over_ranks_of(unit.kind)
        # Fixed, as all below: how messages travel is decided when the model is sharded.
        self._plan, device = plan, torch.device(plan.groups.mesh.device_type)
        self._is_direct = plan.collectives == "auto" and gloo.exchanges_directly(plan.groups.shard, device)
        self._registers = plan.nccl_ub and collectives.can_register(plan.groups.shard, current_device())

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._registers:
            return torch.empty(size, dtype=dtype, device=device)
        backend = self._plan.groups.shard._get_backend(device)
        return backend.allocate_tensor(math.prod(map(int, size)), dtype=dtype, device=device)


class UnitAllGather(_UnitCollective, DefaultAllGather):
    """Gathers a unit.

    Args:
        part: of this rank, where a part of the ranks keeps the unit whole.
    """

    def __init__(self, plan: Plan, unit: UnitPlan, part: KeptPart | None = None) -> None:
        super().__init__(plan, unit)
        # Kept by the gather of a forward, and read by that of its backward. None where ranks keep all or nothing.
        self._part = part

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        part = self._part
        if part is None:
            return self._gather(output_tensor, input_tensor, group, async_op)
        if (kept := part.take()) is not None:
            return self._gather(output_tensor, kept, part.ranks, async_op)
        self._gather(output_tensor, input_tensor, group, async_op=False)
        if current_backward() == NO_BACKWARD:
            part.keep(output_tensor)
        return None

    def _gather(self, output: Tensor, source: Tensor, group: ProcessGroup, async_op: bool) -> Work | None:
        what = f"the parameters of {self.unit}"
        if not self._is_direct:
            return collectives.all_gather_by_backend(output, source, group, what=what, async_op=async_op)
        call = recorded("all-gather", what, output, group)
        work = call.run(partial(gloo.start_all_gather, output, source, group))
        if async_op or work is None:
            return work
        work.wait()
        return None


class UnitReduceScatter(_UnitCollective, DefaultReduceScatter):
    """Reduces the gradients of a unit, in the plan's order of ranks."""

    def __init__(self, plan: Plan, unit: UnitPlan) -> None:
        super().__init__(plan, unit)
        self._what = f"the gradients of {self.unit}"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:  # None too, where torch declares work alone
        if self._is_direct or self._plan.is_reproducible:
            self._reduce(output_tensor, input_tensor, group, op)
            return None
        reduce = partial(super().__call__, output_tensor, input_tensor, group, op, async_op)
        return recorded("reduce-scatter", self._what, input_tensor, group).run(reduce)

    def _reduce(self, output: Tensor, whole: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
        collectives.reduce_scatter(output, whole, group, what=self._what, op=op, order=self._plan.sum_order)
