"""Gathers units before their forward and backward, and prefetches them in the order of the last step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..._torch_compat import NO_BACKWARD, current_backward
from ...comm.lane import CommLane
from ...errors import UnitError
from ..plan import FullyShardedPlan
from .memory import ShardedBuffer
from .unit import Unit


class ParameterGathering:
    """Gathers and hides the parameters of units around the calls of their modules (`install_call_hooks`).

    The main thread calls it in forward, autograd's in backward; never both at once.

    Args:
        units: in the plan's order, the root last.
        buffers: own the units' shards.
        lane: runs the gathers, in the order in which they are started.
    """

    def __init__(
        self, plan: FullyShardedPlan, units: Sequence[Unit], buffers: Sequence[ShardedBuffer], lane: CommLane
    ) -> None:
        self._units, self._buffers, self._lane = units, buffers, lane
        self._root = units[-1]
        # Number of units to prefetch in forward (False) and in backward (True); fixed.
        self._depth = {False: plan.forward_prefetch, True: plan.backward_prefetch}
        # The unit that followed each unit, in forward (False) and in backward (True). `ensure_gathered` updates it
        # during a pass, and `_prefetch` reads the order of the pass before. Never cleared.
        self._next: dict[tuple[bool, Unit], Unit] = {}
        # The last unit, except the root, that `ensure_gathered` gathered in this forward or backward; None before the
        # first one. `_begin` clears it for each forward of the model, `ensure_gathered` for each backward.
        self._last: Unit | None = None
        # The backward that `_last` belongs to, or NO_BACKWARD. `ensure_gathered` sets it.
        self._pass = NO_BACKWARD
        # Count of writes to the shards when gathered units last had their values. `forget` sets it.
        # `ensure_gathered` compares it in each forward, and calls `forget` if an optimizer or load has written since.
        self._version = self._count_writes()
        # Whether each unit's backward reads its weights; fixed.
        self._needs_backward = {
            unit: planned.is_needed_in_backward for unit, planned in zip(units, plan.units, strict=True)
        }
        for unit in units:
            unit.on_use = partial(self._on_use, unit)

    # ---- calls of modules

    def before_call(self, unit: Unit) -> None:
        """Gathers a unit before a module of it runs its forward or another method."""
        if unit is self._root:
            self._begin()
        else:
            unit.running += 1
            self.ensure_gathered(unit)

    def after_call(self, unit: Unit, output: Any) -> None:
        """Ends a call, which returned `output` or raised (None); makes backward through `output` gather the unit."""
        if unit is self._root:
            self._end(output)
        else:
            self._after_forward(unit, output)

    def _begin(self) -> None:
        """Begins a forward of the model."""
        if current_backward() == NO_BACKWARD and not self._root.running:
            self._last = None
        self._root.running += 1
        self.ensure_gathered(self._root)

    def _end(self, output: Any) -> None:
        self._root.running -= 1
        if not self._root.running and current_backward() == NO_BACKWARD and not torch.is_grad_enabled():
            self.settle()
        elif torch.is_grad_enabled():
            self._watch(self._root, output)

    # ---- the whole model

    def end_running(self) -> None:
        """Resets the counts of running forwards, which a forward that raised leaves above zero."""
        for unit in self._units:
            unit.running = 0

    def settle(self) -> None:
        """Hides all parameters: outside of forward and backward a rank may use only its shards.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """
        for unit in self._units:
            unit.finish_gather()
        for unit in self._units:
            unit.hide()

    def forget(self) -> None:
        """Invalidates all gathered parameters, after the shards were written."""
        self.settle()
        for unit in self._units:
            unit.drop_part()
            if unit.slot is not None:
                unit.slot.owner = None
        self._version = self._count_writes()

    def _count_writes(self) -> int:
        return sum(buffer.shards._version for buffer in self._buffers)

    # ---- one unit

    def ensure_gathered(self, unit: Unit) -> None:
        """Gathers a unit, waits for its parameters, and prefetches the units that followed it in the last pass."""
        is_backward = current_backward() != NO_BACKWARD
        if not is_backward and self._version != self._count_writes():
            self.forget()
        if current_backward() != self._pass:
            self._pass, self._last = current_backward(), None
        if not unit.is_gathered:
            self._reject_running(unit)
            unit.start_gather(self._lane, waits=not self._depth[is_backward])
        unit.finish_gather()
        unit.show()
        unit.used_in = current_backward()
        if is_backward:
            unit.drop_part()
        if unit is self._last or unit is self._root:
            return
        if self._last is not None:
            self._next[is_backward, self._last] = unit
        self._last = unit
        self._prefetch(unit, is_backward)

    def _prefetch(self, unit: Unit, is_backward: bool) -> None:
        ahead: Unit | None = unit
        for _ in range(self._depth[is_backward]):
            ahead = self._next.get((is_backward, ahead)) if ahead is not None else None
            if ahead is None or ahead is unit:
                return
            owner = None if ahead.slot is None else ahead.slot.owner
            if not ahead.is_gathered and owner is not unit and (owner is None or not owner.running):
                ahead.start_gather(self._lane, waits=False)

    def _reject_running(self, unit: Unit) -> None:
        owner = None if unit.slot is None else unit.slot.owner
        if owner is not None and owner.running:
            raise UnitError(
                f"unit {unit.name} is needed while unit {owner.name} runs, and both are gathered into one memory; "
                f"keep one of them apart, with reshard_overrides=({owner.name + '=False'!r},)"
            )

    def _after_forward(self, unit: Unit, output: Any) -> None:
        unit.running = max(unit.running - 1, 0)
        if torch.is_grad_enabled():
            if self._needs_backward[unit]:
                self._watch(unit, output)
        elif not self._root.running and not unit.running and current_backward() == NO_BACKWARD:
            self.settle()  # called on its own

    def _watch(self, unit: Unit, output: Any) -> None:
        """Makes a backward gather the unit when it reaches one of the unit's outputs."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    def check_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """Raises if backward computed a gradient with the values of another unit in the shared slot.

        Raises:
            UnitError: this backward has not gathered the unit, and another unit has its slot.
        """
        if unit.is_gathered or unit.used_in == current_backward() or not self._needs_backward[unit]:
            return
        raise UnitError(
            f"parameter {unit.name_of[param]} got a gradient, but backward has not gathered unit {unit.name}: "
            "its forward returned no tensor that torch.utils._pytree finds; return tensors, or tuples, lists or "
            f"dicts of them, or keep the unit gathered with reshard_overrides=({unit.name + '=False'!r},)"
        )

    def _on_use(self, unit: Unit) -> None:
        """Gathers a hidden unit when one of its parameters is used, or raises."""
        if current_backward() == NO_BACKWARD and not any(other.running for other in self._units):
            first = next(iter(unit.name_of.values()))
            raise UnitError(
                f"a parameter of unit {unit.name} (it begins with {first}) was used outside of a forward, where each "
                "rank holds its shard alone; enter the wrapper's whole_parameters() on every rank, or save and load "
                "with core.dist_checkpointing"
            )
        self.ensure_gathered(unit)

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Gathers a unit for its backward; autograd calls it with the gradient of each of its outputs."""
        self.ensure_gathered(unit)
