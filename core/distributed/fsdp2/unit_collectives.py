"""The collectives of FSDP2's units, and in them sums of gradients over micro-batches in a tree.

Torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take the collectives. They go by direct exchange under
gloo, and are recorded under the names of the units. A unit that a part of the ranks keeps whole between forward and
backward (`UnitPlan.kept_among`) is freed by torch as any other. Its all-gather keeps the part of this rank, and
gathers the parts in backward.

With ``reproducible_across_ranks`` torch reduces after every micro-batch. The reduce-scatter keeps the whole gradients
of a micro-batch, adds what the tree adds, and hands torch negative zeros, which change no number that torch adds them
to. After the last micro-batch it reduces the sum of all, over replicas too: torch knows one optimizer instance. With
``reduce_every_micro_batch`` ranks are the lower levels of the tree: whole gradients are reduced, and their shards are
kept and added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.device import current_device
from ...base.errors import ShardstackError, UnitError
from ...base.host_memory import LentMemory
from ...comm import collectives, gloo, streams
from ...comm.gloo import Sum
from ...comm.message_formats import OWN_DTYPE, MessageFormat
from ...comm.record import recorded
from ..engine.gathered_units import KeptPart
from ..engine.gradient_tree import GradientTree, PartialSums
from ..groups import neighbour_groups
from ..plan import Plan, UnitPlan
from .torch_private import (
    DefaultAllGather,
    DefaultReduceScatter,
    TorchState,
    as_fsdp,
    groups_of,
    has_all_reduce_hook,
    shards_of,
)


def set_collectives(plan: Plan) -> tuple[list[KeptPart], LentMemory]:
    """Sets the collectives of every unit. Every rank calls it.

    Returns:
        the parts of the units that a part of the ranks keeps whole, and the memory that large units share.
    """
    whole_bytes = [max(unit.gathered_bytes, _reduced_bytes(unit)) for unit in plan.units]
    memory = LentMemory(max(whole_bytes), least_bytes=_NEVER_REUSED_BYTES)
    neighbours = neighbour_groups(plan.groups.shard, (unit.kept_among for unit in plan.units))
    parts: list[KeptPart] = []
    names = {parameter: name for name, parameter in plan.root.modules[0].named_parameters()}
    for unit in plan.units:
        module, part = as_fsdp(unit.modules[0]), None
        pieces = {param.name: (param.shard_numel, piece) for piece in unit.pieces for param in piece.params}
        members = [pieces[names[shard]] for shard in shards_of(groups_of(unit.modules[0]))]
        gathered = [(numel, piece.param_format) for numel, piece in members]
        reduced = [(numel, piece.grad_format) for numel, piece in members]
        if unit.kept_among is not None:
            part = KeptPart(neighbours[unit.kept_among], outlasts_backward=unit.is_kept)
            parts.append(part)
        module.set_custom_all_gather(UnitAllGather(plan, unit, part, memory, gathered))
        module.set_custom_reduce_scatter(UnitReduceScatter(plan, unit, memory, reduced))
    return parts, memory


Segments = Sequence[tuple[int, str | None]]
"""The parameters of a unit, in the order of its messages: elements of a shard, and the format in which they travel."""

_NEVER_REUSED_BYTES = 2**25
"""The least bytes that glibc maps anew at each allocation, whatever was freed before."""


def _reduced_bytes(unit: UnitPlan) -> int:
    return sum(piece.reduced_bytes for piece in unit.pieces)


class _UnitCollective:
    """What both collectives of a unit are made from.

    They are subclasses of torch's own, so that torch replaces them where a user calls ``set_symm_mem_for_comm`` or
    ``set_allocate_memory_from_process_group_for_comm``; calls are then not recorded.
    """

    def __init__(
        self, plan: Plan, unit: UnitPlan, memory: LentMemory | None, whole_bytes: int, segments: Segments
    ) -> None:
        # In messages, and in the record of collectives.
        self.unit = f"unit {unit.names[0]}" if unit.names[0] else "the root unit"
        plan = plan.over_ranks_of(unit.kind)
        # How messages travel is decided here, when the model is sharded, and not in a step.
        self._plan, device = plan, torch.device(plan.groups.mesh.device_type)
        self._is_direct = plan.settings.collectives == "auto" and gloo.exchanges_directly(plan.groups.shard, device)
        # Large memory under gloo for whole parameters and gradients, which all units of a model share. None where
        # sums keep what a reduction was given.
        self._memory, self._whole_bytes = memory if self._is_direct else None, whole_bytes
        # Of a message, where something is encoded.
        self._segments = [(numel, name or OWN_DTYPE) for numel, name in segments]
        self._is_encoded = any(name for _, name in segments)
        self._registers = plan.settings.nccl_ub and collectives.can_register(plan.groups.shard, current_device())

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(map(int, size))
        if self._registers:
            return self._plan.groups.shard._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
        if self._memory is not None and 2 * numel * dtype.itemsize > self._whole_bytes:  # no shard, which lives on
            return self._memory.take((numel,), dtype, device)
        return torch.empty(numel, dtype=dtype, device=device)


class UnitAllGather(_UnitCollective, DefaultAllGather):
    """Gathers a unit.

    Args:
        part: this rank's part, where neighbours together keep the unit whole.
    """

    def __init__(
        self,
        plan: Plan,
        unit: UnitPlan,
        part: KeptPart | None = None,
        memory: LentMemory | None = None,
        segments: Segments = (),
    ) -> None:
        super().__init__(plan, unit, memory, unit.gathered_bytes, segments)
        # Kept by the gather of a forward, and read by that of its backward. None where ranks keep all or nothing.
        self._part = part

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        part = self._part
        if part is None:
            return self._gather(output_tensor, input_tensor, group, async_op)
        if (own_part := part.take()) is not None:
            return self._gather(output_tensor, own_part, part.ranks, async_op)
        self._gather(output_tensor, input_tensor, group, async_op=False)
        if current_backward() == NO_BACKWARD:
            part.keep(output_tensor)
        return None

    def _gather(self, output: Tensor, source: Tensor, group: ProcessGroup, async_op: bool) -> Work | None:
        send = partial(self._send, group=group, async_op=async_op)
        if not self._is_encoded:
            return send(output, source)
        return MessageFormat(self._segments, source.dtype).gather(output, source, group.size(), send)

    def _send(self, output: Tensor, source: Tensor, group: ProcessGroup, async_op: bool) -> Work | None:
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

    def __init__(self, plan: Plan, unit: UnitPlan, memory: LentMemory | None = None, segments: Segments = ()) -> None:
        super().__init__(plan, unit, memory, _reduced_bytes(unit), segments)
        # How messages name the payload, and torch's object for the unit.
        self._what, self._groups = f"the gradients of {self.unit}", groups_of(unit.modules[0])

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,  # a `ReduceOp` or one of its kinds: torch's name for both is private
        async_op: bool = False,
    ) -> Any:  # None too, where torch declares work alone
        if self._is_direct or self._is_encoded or self._plan.settings.reproducible_across_ranks:
            self._reduce(output_tensor, input_tensor, group, op)
            return None
        reduce = partial(super().__call__, output_tensor, input_tensor, group, op, async_op)
        return recorded("reduce-scatter", self._what, input_tensor, group).run(reduce)

    def _reduce(self, output: Tensor, whole: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
        sent_as = None
        if self._is_encoded:  # torch reduces what is trained now
            of_shards = zip(shards_of(self._groups), self._segments, strict=True)
            sent_as = MessageFormat([segment for shard, segment in of_shards if shard.requires_grad], whole.dtype)
        how = Sum(op=op, order=self._plan.sum_order, sent_as=sent_as)
        collectives.reduce_scatter(output, whole, group, how, what=self._what)


# ---- sums over micro-batches, in a tree

_ADDITIVE_IDENTITY = -0.0
"""What changes no number that it is added to. Positive zero would change the sign of a negative zero."""


class GradientSums:
    """Adds up the gradients of all units of a sharded model in a tree.

    Args:
        modules: every module that FSDP2 acts on.
        state: what torch holds for the model.
    """

    def __init__(self, plan: Plan, tree: GradientTree, state: TorchState) -> None:
        # `_of_shards`: sums are of reduced gradients, because each micro-batch is reduced.
        self._state, self._of_shards = state, plan.settings.reduce_every_micro_batch
        self._units = [_TreeReduceScatter(plan, unit, tree) for unit in plan.units]
        for planned, unit in zip(plan.units, self._units, strict=True):
            if plan.groups.shard.size() > 1:
                as_fsdp(planned.modules[0]).set_custom_reduce_scatter(unit)
            else:  # torch calls no reduce-scatter
                as_fsdp(planned.modules[0]).set_all_reduce_hook(unit.add_alone)
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that are kept from earlier micro-batches."""
        return [tensor for unit in self._units for tensor in unit.tensors]

    def clear(self) -> None:
        """Begins a step: drops what is kept."""
        for unit in self._units:
            unit.clear()

    def _begin(self, additions: int | None, reduces: bool) -> None:
        for unit in self._units:
            unit.reject_all_reduce_hook()
        if self._of_shards and reduces:
            self._state.complete_accumulated_gradients()
        if self._of_shards:  # torch adds up the whole gradients of the micro-batches that are reduced together
            for module in self._state.modules:
                module.set_requires_gradient_sync(reduces, recurse=False)
        if additions is not None:
            for unit in self._units:
                unit.set_aside(additions)


class _TreeReduceScatter(UnitReduceScatter):
    """Reduces one unit's sum over the micro-batches of a step, in the backward of the last."""

    def __init__(self, plan: Plan, unit: UnitPlan, tree: GradientTree) -> None:
        super().__init__(plan, unit)
        # The tree is the wrapper's, which all units share.
        self._tree, self._module, self._replicas = tree, as_fsdp(unit.modules[0]), plan.groups.replicate
        self._of_shards, self._is_alone = plan.settings.reduce_every_micro_batch, plan.groups.shard.size() == 1
        # The gradients that are added in place, whole or of shards, flat, in memory of their own. `_add` sets and
        # clears it, on torch's stream for reductions; `set_aside` moves it to `_sums`, between reductions.
        self._current: Tensor | None = None
        # Sums of earlier micro-batches. `set_aside` adds them when a backward begins, `_add` takes them out after the
        # last one of a step, both on autograd's thread; `clear` drops them between steps.
        self._sums = PartialSums()
        # The last backward that has reduced the unit, to notice a second run of the unit in it.
        self._reduced_in = NO_BACKWARD

    def _reduce(self, output: Tensor, whole: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
        self._sum(whole, output, partial(super()._reduce, group=group, op=op))

    def add_alone(self, gradient: Tensor) -> None:
        """Does in place for a rank that is alone among shards what `_reduce` does for several."""
        self._sum(gradient.clone(), gradient, Tensor.copy_)

    def _sum(self, whole: Tensor, shard: Tensor, reduce: Callable[[Tensor, Tensor], Any]) -> None:
        """Makes `shard` this rank's part of the sum over the step, once it is complete. `reduce` fills it from whole
        gradients."""
        is_late = current_backward() == NO_BACKWARD  # a gradient that its unit's backward has left
        if not is_late:
            self._reject_what_adds_by_itself()
        total = whole if is_late or self._of_shards else self._add(whole)
        if total is not None:
            reduce(shard, total)
            if self._replicas is not None:
                order = (range(self._replicas.size()),)
                collectives.all_reduce(shard, self._replicas, Sum(order=order), what=f"the gradients of {self.unit}")
            if self._of_shards and not is_late and (total := self._add(shard.clone())) is not None:
                shard.copy_(total)
        if total is None:
            shard.fill_(_ADDITIVE_IDENTITY)

    def set_aside(self, additions: int) -> None:
        """Ends the sum that is added in place, and adds it to the newest `additions` sums before it."""
        freed = self._sums.set_aside(self._current, additions)
        self._current = None
        for tensor in (*freed, *self._sums.tensors):
            _keep_for_this_stream(tensor)

    def reject_all_reduce_hook(self) -> None:
        """Raises if the caller has added what torch calls between a reduction and the gradient of the shard."""
        if not self._is_alone and has_all_reduce_hook(self._module):
            raise UnitError(
                f"set_all_reduce_hook was called on {self.unit}, and reproducible_across_ranks adds up gradients in "
                "one order; drop one of the two"
            )

    def clear(self) -> None:
        """Drops all sums."""
        self._current, self._reduced_in = None, NO_BACKWARD
        self._sums.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The sums that are kept."""
        return [*self._sums.tensors, *(() if self._current is None else (self._current,))]

    def _add(self, gradients: Tensor) -> Tensor | None:
        """Adds the gradients of a micro-batch, taking their memory. Returns the sum of the step after the last."""
        _keep_for_this_stream(gradients)
        self._current = gradients if self._current is None else self._current.add_(gradients)
        if not self._tree.is_last:
            return None
        total = self._sums.added_to(self._current)
        self._current = None
        return total

    def _reject_what_adds_by_itself(self) -> None:
        if not self._tree.has_entered:
            raise UnitError(
                f"a backward reached {self.unit} around the tensors that the model's forward returned; for "
                "reproducible_across_ranks return tensors, or tuples, lists or dicts of them"
            )
        if self._tree.is_synced and not self._of_shards and not self._tree.is_last:
            raise ShardstackError(
                "a backward before the last of a step was to be reduced by itself, and reproducible_across_ranks "
                "reduces the sum of all; put every backward of a step but the last inside no_sync"
            )
        if self._reduced_in == current_backward():  # two addends of torch's sum, where the tree has one
            raise UnitError(
                f"{self.unit} ran twice in one forward, and FSDP2 adds the gradient of each run by itself; for "
                "reproducible_across_ranks make its parent the unit, or use FullyShardedDataParallel"
            )
        self._reduced_in = current_backward()


def _keep_for_this_stream(tensor: Tensor) -> None:
    """Keeps the memory of a sum until the current stream, which may not have allocated it, is done with it."""
    if streams.is_asynchronous(tensor.device):
        streams.used_on(tensor, streams.current_stream())
