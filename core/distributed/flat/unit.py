"""Units of parameters that are gathered together, and their slots: memory that they are gathered into, in turns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...base._torch_compat import NO_BACKWARD
from ...base.host_memory import transient_memory
from ...base.parameters import can_be_pending, end_pending, make_pending
from ...comm import collectives
from ...comm.collectives import Allocate
from ...comm.lane import CommLane, Handle
from ...comm.message_formats import format_of_all
from ..engine.gathered_units import KeptPart, WriteCounts, lost_write
from ..groups import neighbour_groups
from ..model.forward_hooks import SavedWeights
from ..plan import Plan, UnitPlan
from .bucket import Bucket

POISONS = "SHARDSTACK_POISON_SLOTS"
"""If 1 in the environment, fills a slot with NaN when its unit is hidden, so that reads which bypass the check (saved
views, C++) become visible. Each use gathers again."""


class Slot:
    """Memory that units of one size are gathered into, one at a time.

    The lane that fills it begins after what was queued before (`CommLane.submit`), so that computation with the unit
    before has read it; `Unit.finish_gather` makes the computation that follows wait for the lane.

    Args:
        sizes: elements, dtype and device of each of its parts.
        allocate: allocates their memory.

    Attributes:
        parts: memory for the whole parameters of a unit, by kind. The parameters of every unit of the slot are views
            of it. A lane writes it during a gather. Without memory between `free` and `allocate`.
        units: the units that take turns with it.
        owner: the unit whose values are in it, or are being gathered; None if there is none.
    """

    def __init__(self, sizes: Sequence[tuple[int, torch.dtype, torch.device]], allocate: Allocate) -> None:
        # Fixed: how `leave_to` makes new memory.
        self._sizes, self._allocate = sizes, allocate
        self.parts: list[Tensor] = []
        # Each unit adds itself when it is built; `leave_to` removes all but one.
        self.units: list[Unit] = []
        # `Unit.start_gather` sets it, on the main thread or autograd's. None before the first gather, after the shards
        # were written (`ShardedParameters.invalidate`), while parameters are in memory of their own
        # (`Unit.gather_apart`), and where one was written while it was gathered.
        self.owner: Unit | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocates the memory, without values, and places the parameters of the units in it."""
        with torch.inference_mode(False):  # `leave_to` may be called in an evaluation, whose memory no step could use
            self._hold([self._allocate(*size) for size in self._sizes])

    def free(self) -> None:
        """Frees the memory: parameters have shapes alone until `allocate`. None of its units may be in use."""
        self._hold([torch.empty(1, dtype=dtype, device=device).expand(numel) for numel, dtype, device in self._sizes])

    def _hold(self, parts: list[Tensor]) -> None:
        units, self.parts, self.units = self.units, parts, []
        self._place(units)

    def _place(self, units: Sequence[Unit]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # their parameters are hidden: placing them must not gather
            for unit in units:
                unit.enter(self)
                unit.place()

    def leave_to(self, unit: Unit) -> Sequence[Unit]:
        """Leaves the memory, with its values, to `unit`. Returns the others, which take turns with new memory."""
        others = [other for other in self.units if other is not unit]
        rest = Slot(self._sizes, self._allocate)
        self.units = [unit]
        rest._place(others)
        return others


class UnitPhase(Enum):
    """The state of a unit's parameters::

        READABLE <--- wait_until_readable, hide ---> HIDDEN
           ^                                           |
           +--- return_to_slot --- APART <--- gather_apart, from either

    A unit without a slot is HIDDEN while it is gathered in place and forward goes on. Autograd's thread changes the
    phase during a backward, else the main thread.

    Gradients have no phase here: under ZeRO-3 those of a unit accumulate or are reduced while its parameters are
    hidden, gathered or in use. `Bucket.has_left` says whether they were sent.
    """

    READABLE = auto()
    """Parameters are in the slot and have its values, equal to the shards once a gather is finished."""
    HIDDEN = auto()
    """Use of the parameters calls `on_use`, which waits for them, gathers them or raises."""
    APART = auto()
    """Parameters are in memory of their own, or in place without a slot: whole for the caller, who may write them."""


class Unit:
    """Parameters that are gathered together: of modules, or of a bucket of replicas, which is gathered in place.

    Args:
        plan: the unit's plan: its modules, and whether it is freed after their forward.
        slot: its memory while it is gathered; None where one rank has all, and for replicas.
        buckets: its parameters of each dtype and device, in the order of the slot's parts.
        neighbours: those of the ranks with shards that together keep all of it between forward and backward; None
            means all.

    Attributes:
        name: the names of its modules, or of its bucket, for messages.
        name_of: its parameters, each with its name in the model; fixed.
        on_use: what a use of a hidden parameter calls.
        saved_weights: what autograd saves in its forwards, if it is freed after them.
        num_running: calls of its modules that have begun and not ended.
        used_in: the backward that needed it last, or `NO_BACKWARD` for a forward.
    """

    def __init__(
        self, plan: UnitPlan, slot: Slot | None, buckets: Sequence[Bucket], neighbours: ProcessGroup | None = None
    ) -> None:
        # Fixed, but for the slot: units get another one when weights of its unit outlive a forward.
        self.plan, self.slot, self.buckets = plan, slot, buckets
        self.name = " + ".join(plan.names) or "of the model itself"
        if slot is not None:
            self.enter(slot)
        # How log and error messages name this unit's all-gathers.
        self._what = f"the parameters of {f'unit {self.name}' if plan.modules else buckets[0].name}"
        # `CallHooks` counts them, on the thread of the forward, and resets it when gradients are zeroed.
        self.num_running = 0
        # `ShardedParameters.gather` sets it, on the thread that needs the unit.
        self.used_in = NO_BACKWARD
        # The gather that is running in the lane, or None. `start_gather` sets it; `finish_gather` clears it.
        self._handle: Handle | None = None
        # Of each bucket, if neighbours keep the unit. `start_gather` of the unit that takes the slot in forward fills
        # them. The gather of a backward takes them; `ShardedParameters` drops them, when the shards are written too.
        self.parts = [KeptPart(neighbours) for _ in buckets] if neighbours is not None else []
        self.name_of = {slot.param: slot.name for bucket in buckets for slot in bucket.slots}
        # Parameters that can make their reader wait.
        self._params_to_hide = [param for param in self.name_of if can_be_pending(param)]
        # Writes to the parameters since they were last hidden, or their memory set. `hide` asks for them: a write in
        # between would be lost. A gather writes the slot and does not count.
        self._writes = WriteCounts(lambda: [param._version for param in self.name_of])
        # Methods of this class set it: on autograd's thread during a backward, else on the main thread.
        self.phase = UnitPhase.READABLE
        # `ShardedParameters`, which replicas do not have, sets both when it is built.
        self.on_use: Callable[[], None] = self.wait_until_readable
        self.saved_weights: SavedWeights | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether the unit's parameters have the values of the shards, or are about to have them."""
        return self.slot is None or self.slot.owner is self

    def memory(self) -> Sequence[Tensor]:
        """Returns the memory that the unit is gathered into."""
        return [bucket.param_data for bucket in self.buckets]

    @property
    def takes_turns(self) -> bool:
        """Whether other units are gathered into the same slot."""
        return self.slot is not None and len(self.slot.units) > 1

    def enter(self, slot: Slot) -> None:
        """Takes turns with a slot from now on. `place` moves the parameters there."""
        self.slot = slot
        slot.units.append(self)
        for bucket, part in zip(self.buckets, slot.parts, strict=True):
            bucket.param_data = part

    def place(self, skip: Callable[[Tensor], bool] | None = None) -> None:
        """Makes the parameters views of the slot, except those for which `skip` is true."""
        for bucket in self.buckets:
            bucket.place_params(bucket.param_data, skip)
        self._writes.find()

    @torch.no_grad()
    def take_values(self) -> None:
        """Copies this rank's part of the values of the parameters into the shards."""
        for bucket in self.buckets:
            for param, own, start in bucket.local_ranges():
                if not has_no_memory(param):
                    own.copy_(param.detach().flatten()[start : start + own.numel()])

    def start_gather(self, lane: CommLane, *, waits: bool) -> None:
        """Gathers the shards into the slot, in place of another unit, or without a slot in place.

        Args:
            waits: return when the parameters may be read. Always so where one of them cannot make its reader wait.
        """
        if self.slot is not None:
            before, self.slot.owner = self.slot.owner, self
            if before is not None and before is not self:
                before.finish_gather()
                if before.used_in == NO_BACKWARD and torch.is_grad_enabled():  # its backward follows
                    for part, whole in zip(before.parts, before.memory(), strict=False):
                        if part.tensor is None:
                            part.keep(whole)
                before.hide()
        gather = partial(self._gather, [part.take() for part in self.parts])
        if waits or len(self._params_to_hide) < len(self.name_of):
            lane.run(gather)
            return
        self._handle = lane.submit(gather)
        if self.slot is None:
            self._make_pending()

    def _gather(self, parts: Sequence[Tensor | None]) -> None:
        for index, bucket in enumerate(self.buckets):
            if parts and (part := parts[index]) is not None:
                sent_as = format_of_all(bucket.param_format, len(part), part.dtype)
                collectives.all_gather(bucket.param_data, part, self.parts[index].ranks, sent_as, what=self._what)
            else:
                bucket.gather_params(bucket.param_data, self._what, sent_as=bucket.param_format)

    def finish_gather(self) -> None:
        """Waits for the running gather, if any."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()

    def wait_until_readable(self, *unused: Any) -> None:
        """Waits for the running gather, if any, and makes the parameters readable. They are gathered."""
        self.finish_gather()
        if self.phase is UnitPhase.HIDDEN:
            self.phase = UnitPhase.READABLE
            end_pending(self._params_to_hide)

    def hide(self) -> None:
        """Makes a use of the unit's parameters call `on_use`.

        Raises:
            UnitError: a parameter was written while it was gathered; the write would be lost.
        """
        if self.phase is not UnitPhase.READABLE or self.slot is None:
            return
        indices = self._writes.find()
        self._make_pending()
        if os.environ.get(POISONS) == "1" and self.slot.owner in (self, None):
            self.slot.owner = None
            for whole in self.memory():
                if whole.is_floating_point():
                    whole.fill_(math.nan)
        if indices:
            self.slot.owner = None
            raise lost_write(
                [*self.name_of.values()][indices[0]], "between steps, inside the wrapper's whole_parameters()"
            )

    def _make_pending(self) -> None:
        self.phase = UnitPhase.HIDDEN
        make_pending(self._params_to_hide, self.on_use)

    def gather_apart(self) -> None:
        """Gathers the unit into memory of its own, until `return_to_slot`."""
        self.wait_until_readable()
        self.phase = UnitPhase.APART
        if self.slot is None:
            return
        self.slot.owner = None
        for bucket in self.buckets:
            apart = transient_memory(bucket.numel, bucket.local_param_shard.dtype, bucket.param_data.device)
            bucket.gather_params(apart, self._what)
            bucket.place_params(apart)

    def return_to_slot(self) -> None:
        """Takes what was written since `gather_apart` into this rank's shard, and frees that memory."""
        self.phase = UnitPhase.READABLE
        if self.slot is None:
            return
        self.take_values()
        self.place()


def has_no_memory(param: Tensor) -> bool:
    """Returns whether `allocate_meta_tensors` gave a parameter only a shape."""
    return param.numel() > 1 and param.untyped_storage().nbytes() == param.element_size()


def build_units(plan: Plan, buckets: Mapping[tuple[int, int], Bucket], allocate: Allocate) -> list[Unit]:
    """Builds the units of a plan, in its order, and the slots that they share. Every rank calls it.

    Args:
        buckets: all buckets, keyed by buffer and index in the plan.
        allocate: allocates the memory of slots.
    """
    slots, units = dict[int | None, Slot](), list[Unit]()
    neighbours = neighbour_groups(plan.groups.shard, (unit.kept_among for unit in plan.units))
    for unit_plan in plan.units:
        own = [buckets[piece.bucket] for piece in unit_plan.pieces if piece.bucket is not None]
        if unit_plan.slot is not None and unit_plan.slot not in slots:
            sizes = [(bucket.numel, bucket.buffer.kind.gathered_dtype, bucket.buffer.device) for bucket in own]
            slots[unit_plan.slot] = Slot(sizes, allocate)
        slot, kept_among = slots.get(unit_plan.slot), neighbours.get(unit_plan.kept_among)
        units.append(Unit(unit_plan, slot, own, kept_among))
    return units
