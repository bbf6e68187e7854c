"""Gathers units before their forward and backward, and prefetches them in the order of the last step.

Hooks around calls of modules gather parameters and cast inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_map

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import UnitError, warn_once
from ...comm.lane import CommLane
from ..engine.gathered_units import UnitOrder, WriteCounts
from ..model.forward_hooks import SavedWeights, WrapperHook, enclose, in_use_message, watch_outputs
from ..plan import Plan
from .unit import Unit, UnitPhase


class ParameterGathering:
    """Gathers and hides the parameters of units around the calls of their modules (`install_call_hooks`).

    The main thread calls it in forward, autograd's in backward; never both at once.

    Args:
        units: all units in the plan's order, the root last.
        shards: this rank's shards of all parameters.
        lane: runs the gathers, in the order in which they are started.
        note_moved: called with names and parameters when a unit gets other memory.
        note_skipped: called with a unit that a running backward will not reach.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        shards: Sequence[Tensor],
        lane: CommLane,
        note_moved: Callable[[Iterable[tuple[str, nn.Parameter]]], None],
        note_skipped: Callable[[Unit], None],
    ) -> None:
        # All fixed. The wrapper owns units and shards, and its process the lane.
        self._units, self._shards, self._lane = units, shards, lane
        self._note_moved, self._note_skipped = note_moved, note_skipped
        self._root, self._plan = units[-1], plan
        # Learns the order of units from forwards; `forget` ends an order.
        self._order = UnitOrder(plan, {unit: unit.plan for unit in units[:-1]}, self._pass_by)
        # Writes to the shards since gathered units last had their values. Each forward asks for those of an optimizer
        # or a load, and calls `forget`, which begins anew.
        self._writes = WriteCounts(lambda: [shards._version for shards in self._shards])
        for unit in units:
            # Called on the thread that uses a hidden parameter: of a forward, or autograd's in a backward.
            unit.on_use = partial(self._on_use, unit)
            if unit.plan.is_freed and unit.slot is not None:
                unit.saved_weights = SavedWeights(unit.memory, partial(self._gather_saved, unit))

    # ---- calls of modules

    def before_call(self, unit: Unit, module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Gathers a unit before a module of it runs its forward or another method. Returns inputs that are cast."""
        # A forward of the model begins an order, also one in a method such as `generate`, and so does the method.
        if unit is self._root and (module is not None or not unit.num_running) and current_backward() == NO_BACKWARD:
            self._order.begin()
        unit.num_running += 1
        self.ensure_gathered(unit)
        if unit.saved_weights is not None:
            unit.saved_weights.begin()
        precision = unit.plan.precision
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        return None if dtype is None else (_cast(args, dtype), _cast(kwargs, dtype))

    def after_call(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Ends a call, which returned `output` or raised (None). Makes backward through `output` gather the unit.

        Returns outputs that are cast.
        """
        if unit is self._root and (module is not None or unit.num_running == 1):
            if output is not None:
                self._gather_skipped()
            self._order.leave_model()
        unit.num_running = max(unit.num_running - 1, 0)
        has_ended = not unit.num_running and current_backward() == NO_BACKWARD
        if unit is not self._root:
            self._order.leave(unit, output, unit.name_of)
        if unit.saved_weights is not None:
            unit.saved_weights.end()
            if has_ended and unit.takes_turns:
                if output is not None and unit.saved_weights.are_in_use():
                    self._keep(unit)
                else:
                    unit.hide()
        if torch.is_grad_enabled():
            if unit.plan.is_needed_in_backward:
                watch_outputs(output, partial(self.ensure_gathered, unit))
        elif has_ended and not self._root.num_running:
            self.settle()  # nothing else would free it before the next forward
        dtype = unit.plan.precision.output_dtype
        return None if dtype is None else _cast(output, dtype)

    def before_state_dict(self, *unused: Any) -> None:
        """Hides gathered parameters, so that a state dict has this rank's shards."""
        if not self._root.num_running:
            self.settle()

    # ---- the whole model

    def end_running(self) -> None:
        """Resets the counts of running forwards, which a forward that was interrupted leaves above zero."""
        for unit in self._units:
            unit.num_running = 0
            if unit.saved_weights is not None:
                unit.saved_weights.end_all()

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
        self._writes.find()
        self._order.end_step()

    def find_writes(self, *, expected: bool = False) -> bool:
        """Returns whether shards were written since gathered units last had their values, or are `expected` to be.

        Raises:
            UnitError: and the model shows copies, inside of `whole_parameters`, which do not have what is written.
        """
        is_written = bool(self._writes.find()) or expected
        if is_written and self._root.phase is UnitPhase.APART:
            raise UnitError(
                "shards of weights are written (by average.swapped(), or a load into tensors from before) inside "
                "whole_parameters(), where the model shows copies of them; leave it first, or enter it inside swapped"
            )
        return is_written

    # ---- one unit

    def ensure_gathered(self, unit: Unit, *unused: Any) -> None:
        """Gathers a unit, waits for its parameters, and prefetches the units that are expected after it.

        Args:
            unused: a gradient, where autograd calls it.
        """
        is_backward = current_backward() != NO_BACKWARD
        if is_backward:
            self._order.reach(unit)
        else:
            if self.find_writes():
                self.forget()
            if unit is not self._root:
                self._gather_skipped(unit)
        if not unit.is_gathered:
            self._reject_running(unit)
            depth = self._plan.settings.backward_prefetch if is_backward else self._plan.settings.forward_prefetch
            unit.start_gather(self._lane, waits=not depth)
        unit.wait_until_readable()
        unit.used_in = current_backward()
        if is_backward:
            unit.drop_part()
        for ahead in self._order.enter(unit) if unit is not self._root else ():
            owner = None if ahead.slot is None else ahead.slot.owner
            if not ahead.is_gathered and owner is not unit and (owner is None or not owner.num_running):
                ahead.start_gather(self._lane, waits=False)

    def _gather_skipped(self, unit: Unit | None = None) -> None:
        """Gathers the units that this forward skips before `unit`, or before its end."""
        for skipped in self._order.skipped_before(unit):
            self.ensure_gathered(skipped)
            self._order.leave_skipped(skipped)
            if skipped.saved_weights is not None and skipped.takes_turns:
                skipped.hide()

    def _pass_by(self, unit: Unit, begins: bool) -> None:
        """Gathers a unit that backward does not reach on this rank, or ends its part in that backward."""
        if not begins:
            self._note_skipped(unit)
        elif unit.plan.is_needed_in_backward:
            self.ensure_gathered(unit)

    def _reject_running(self, unit: Unit) -> None:
        owner = None if unit.slot is None else unit.slot.owner
        if owner is not None and owner.num_running:
            raise UnitError(
                f"unit {unit.name} is needed while unit {owner.name} runs, and both are gathered into one memory; "
                f"keep one of them apart, with reshard_overrides=({owner.name + '=False'!r},)"
            )

    def _on_use(self, unit: Unit) -> None:
        """Gathers a hidden unit when one of its parameters is used, or raises."""
        if current_backward() == NO_BACKWARD and not any(other.num_running for other in self._units):
            first = next(iter(unit.name_of.values()))
            raise UnitError(
                f"a parameter of unit {unit.name} (it begins with {first}) was used outside of a forward, where each "
                "rank holds its shard alone; enter the wrapper's whole_parameters() on every rank, or save and load "
                "with core.dist_checkpointing"
            )
        self.ensure_gathered(unit)
        if current_backward() == NO_BACKWARD and not unit.num_running and unit.takes_turns:
            self._keep(unit)

    def _keep(self, unit: Unit) -> None:
        """Leaves a unit the memory that it is gathered into, because its weights are used outside of its forwards."""
        warn_once(in_use_message(unit.name))
        for other in unit.slot.leave_to(unit) if unit.slot is not None else ():
            self._note_moved((name, param) for param, name in other.name_of.items())

    def _gather_saved(self, unit: Unit) -> None:
        """Gathers a unit, of which backward is about to read a weight that autograd has saved."""
        if unit.used_in != current_backward() or not unit.is_ready:
            self.ensure_gathered(unit)


def install_call_hooks(plan: Plan, units: Sequence[Unit], gathering: ParameterGathering) -> None:
    """Gathers parameters around every forward of the units' modules, and around the methods that the plan names.

    Also makes a state dict hold this rank's shards. Hooks and replaced methods are never removed.

    Args:
        units: all units in the plan's order, the root last.

    Raises:
        WrapError: the plan names a method that no unit has.
    """
    methods = plan.find_forward_methods()
    for module in plan.root.modules[0].modules():
        module.register_state_dict_pre_hook(WrapperHook(gathering.before_state_dict))
    for unit in units:
        before, after = partial(gathering.before_call, unit), partial(gathering.after_call, unit)
        for module in unit.plan.modules:
            module.register_forward_pre_hook(WrapperHook(before), prepend=True, with_kwargs=True)
            module.register_forward_hook(WrapperHook(after), always_call=True)
            for name in methods.get(module, ()):
                setattr(module, name, enclose(getattr(module, name), before, after))


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a tree to `dtype`. Returns the same tree if all of them have it."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not tree_any(is_other, tree):
        return tree
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, tree)
