"""Parameters in shards, which units gather into memory that they share before their forward and backward (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_map

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import UnitError, warn_once
from ...base.memory_categories import Held
from ...base.parameters import keep_range, set_pending_view
from ...comm.lane import CommLane
from ...dist_checkpointing.global_view import whole_view
from ..engine.engine import Parameters
from ..engine.gathered_units import UnitOrder, WriteCounts
from ..model.forward_hooks import SavedWeights, WrapperHook, enclose, in_use_message, watch_outputs
from ..model.initial_values import InitialValues
from ..plan import Plan
from .buffer import FlatBuffer
from .unit import Unit, UnitPhase, has_no_memory


class ShardedParameters(Parameters):
    """This rank's shards of all parameters, and the units that are gathered from them.

    Outside of forward, backward and `whole` the model's parameters have shapes and dtypes, and no values. The main
    thread calls it in forward, autograd's in backward; never both at once.

    Args:
        model: the model inside the wrapper.
        units: in the plan's order, the root last.
        buffers: own the shards.
        start: the initial values, of which those that exist are in the parameters.
        lane: runs the gathers, in the order in which they are started.
        note_moved: called with names and parameters when a unit gets other memory.
        note_skipped: called with a unit that a running backward will not reach.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        units: Sequence[Unit],
        buffers: Iterable[FlatBuffer],
        start: InitialValues,
        lane: CommLane,
        note_moved: Callable[[Iterable[tuple[str, nn.Parameter]]], None],
        note_skipped: Callable[[Unit], None],
    ) -> None:
        # The wrapper owns units and shards, and its process the lane.
        self._plan, self._model, self._units, self._root, self._lane = plan, model, units, units[-1], lane
        self._note_moved, self._note_skipped = note_moved, note_skipped
        self._shards = [buffer.shards for buffer in buffers if buffer.shards is not None]
        # Values that exist go into the shards first. What was on the meta device is then filled in, one tensor at a
        # time, into the shards too, while the parameters that it belongs to have no memory of their own.
        for unit in units:
            unit.take_values()
            unit.place(skip=has_no_memory)
        self._note_ranges()
        start.fill()
        for unit in units:
            unit.place()
        # Learns the order of units from forwards; `invalidate` ends an order.
        self.order = UnitOrder(plan, {unit: unit.plan for unit in units[:-1]}, self._pass_by)
        # Writes to the shards since gathered units last had their values. Each forward asks for those of an optimizer
        # or a load, and calls `invalidate`, which begins anew.
        self._writes = WriteCounts(lambda: [shards._version for shards in self._shards])
        for unit in units:
            # Called on the thread that uses a hidden parameter: of a forward, or autograd's in a backward.
            unit.on_use = partial(self._on_use, unit)
            if unit.plan.is_freed and unit.slot is not None:
                unit.saved_weights = SavedWeights(unit.memory, partial(self._gather_saved, unit))
        for param in model.parameters():
            set_pending_view(param, partial(whole_view, param))
        CallHooks(plan, units, self)

    # ---- the whole model

    def settle(self) -> None:
        for unit in self._units:
            unit.finish_gather()
        for unit in self._units:
            unit.hide()

    def invalidate(self) -> None:
        self.settle()
        for unit in self._units:
            for part in unit.parts:
                part.tensor = None
            if unit.slot is not None:
                unit.slot.owner = None
        self._writes.find()
        self.order.end_step()

    def abandon(self) -> None:
        for unit in self._units:
            unit.num_running = 0
            if unit.saved_weights is not None:
                unit.saved_weights.end_all()
        self.settle()

    def check_may_write(self) -> None:
        if self._root.phase is UnitPhase.APART:
            raise UnitError(
                "shards of weights are written (by average.swapped(), release(), a load into tensors from before) "
                "inside whole_parameters(), where the model shows copies of them; leave it first, or enter it inside "
                "swapped"
            )

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self._root.phase is UnitPhase.APART:  # inside of another one
            yield
            return
        self.invalidate()
        for unit in self._units:
            unit.gather_apart()
            for param in unit.name_of:
                keep_range(param, None)
        try:
            yield
            if self._writes.find():
                self.check_may_write()
        finally:
            for unit in self._units:
                unit.return_to_slot()
            self._note_ranges()
            self.invalidate()

    def receivers(self) -> list[nn.Parameter]:
        return list(self._model.parameters())

    def held(self) -> dict[Held, list[Tensor]]:
        slots = {unit.slot for unit in self._units if unit.slot is not None}
        gathered = [part for slot in slots for part in slot.parts]
        gathered += [part.tensor for unit in self._units for part in unit.parts if part.tensor is not None]
        return {"parameters": [*self._shards, *self._model.buffers()], "gathered parameters": gathered}

    def _note_ranges(self) -> None:
        for bucket in (bucket for unit in self._units for bucket in unit.buckets):
            for param, shard, start in bucket.local_ranges():
                keep_range(param, (shard, start))

    # ---- one unit

    def gather(self, unit: Unit, *unused: Any) -> None:
        """Gathers a unit, waits for its parameters, and prefetches the units that are expected after it.

        Args:
            unused: a gradient, where autograd calls it.

        Raises:
            UnitError: a unit that runs is in the same memory.
        """
        backward = current_backward()
        is_backward = backward != NO_BACKWARD
        if is_backward:
            self.order.reach(unit)
        else:
            if self._writes.find():
                self.check_may_write()
                self.invalidate()
            if unit is not self._root:
                self.gather_skipped(unit)
        if not unit.is_gathered:
            owner = None if unit.slot is None else unit.slot.owner
            if owner is not None and owner.num_running:
                raise UnitError(
                    f"unit {unit.name} is needed while unit {owner.name} runs, and both are gathered into one memory; "
                    f"keep one of them apart, with reshard_overrides=({owner.name + '=False'!r},)"
                )
            settings = self._plan.settings
            unit.start_gather(
                self._lane, waits=not (settings.backward_prefetch if is_backward else settings.forward_prefetch)
            )
        unit.wait_until_readable()
        unit.used_in = backward
        if is_backward:
            for part in unit.parts:
                part.tensor = None
        for ahead in self.order.enter(unit) if unit is not self._root else ():
            owner = None if ahead.slot is None else ahead.slot.owner
            # Not into the memory of a unit that computes with it, now or further out.
            if not ahead.is_gathered and owner is not unit and (owner is None or not owner.num_running):
                ahead.start_gather(self._lane, waits=False)

    def gather_skipped(self, unit: Unit | None = None) -> None:
        """Gathers the units that this forward skips before `unit`, or before its end."""
        for skipped in self.order.skipped_before(unit):
            self.gather(skipped)
            self.order.leave_skipped(skipped)
            if skipped.saved_weights is not None and skipped.takes_turns:
                skipped.hide()

    def _pass_by(self, unit: Unit, begins: bool) -> None:
        """Gathers a unit that backward does not reach on this rank, or ends its part in that backward."""
        if not begins:
            self._note_skipped(unit)
        elif unit.plan.is_needed_in_backward:
            self.gather(unit)

    def _on_use(self, unit: Unit) -> None:
        """Gathers a hidden unit when one of its parameters is used, or raises."""
        if current_backward() == NO_BACKWARD and not any(other.num_running for other in self._units):
            first = next(iter(unit.name_of.values()))
            raise UnitError(
                f"a parameter of unit {unit.name} (it begins with {first}) was used outside of a forward, where each "
                "rank holds its shard alone; enter the wrapper's whole_parameters() on every rank, or save and load "
                "with shardstack.dist_checkpointing"
            )
        self.gather(unit)
        if current_backward() == NO_BACKWARD and not unit.num_running and unit.takes_turns:
            self.keep(unit)

    def keep(self, unit: Unit) -> None:
        """Leaves a unit the memory that it is gathered into, because its weights are used outside of its forwards."""
        warn_once(in_use_message(unit.name))
        for other in unit.slot.leave_to(unit) if unit.slot is not None else ():
            self._note_moved((name, param) for param, name in other.name_of.items())

    def _gather_saved(self, unit: Unit) -> None:
        """Gathers a unit, of which backward is about to read a weight that autograd has saved."""
        if unit.used_in != current_backward() or unit.phase is UnitPhase.HIDDEN:
            self.gather(unit)


class CallHooks:
    """Hooks around the forwards of the units' modules, and around the methods that the plan names.

    They gather parameters and cast inputs, make a state dict hold this rank's shards, and are never removed.

    Args:
        units: all units in the plan's order, the root last.

    Raises:
        WrapError: the plan names a method that no unit has.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit], parameters: ShardedParameters) -> None:
        self._root, self._parameters = units[-1], parameters
        methods = plan.find_forward_methods()
        for module in plan.root.modules[0].modules():
            module.register_state_dict_pre_hook(WrapperHook(self._before_state_dict))
        for unit in units:
            before, after = partial(self._before, unit), partial(self._after, unit)
            for module in unit.plan.modules:
                module.register_forward_pre_hook(WrapperHook(before), prepend=True, with_kwargs=True)
                module.register_forward_hook(WrapperHook(after), always_call=True)
                for name in methods.get(module, ()):
                    setattr(module, name, enclose(getattr(module, name), before, after))

    def _before(self, unit: Unit, module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Gathers a unit before a module of it runs its forward or another method. Returns inputs that are cast."""
        # A forward of the model begins an order, also one in a method such as `generate`, and so does the method.
        if unit is self._root and (module is not None or not unit.num_running) and current_backward() == NO_BACKWARD:
            self._parameters.order.begin()
        unit.num_running += 1
        self._parameters.gather(unit)
        if unit.saved_weights is not None:
            unit.saved_weights.begin()
        precision = unit.plan.precision
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        return None if dtype is None else (_cast(args, dtype), _cast(kwargs, dtype))

    def _after(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Ends a call, which returned `output` or raised (None). Makes backward through `output` gather the unit.

        Returns outputs that are cast.
        """
        if unit is self._root and (module is not None or unit.num_running == 1):
            if output is not None:
                self._parameters.gather_skipped()
            self._parameters.order.leave_model()
        unit.num_running = max(unit.num_running - 1, 0)
        has_ended = not unit.num_running and current_backward() == NO_BACKWARD
        if unit is not self._root:
            self._parameters.order.leave(unit, output, unit.name_of)
        if unit.saved_weights is not None:
            unit.saved_weights.end()
            if has_ended and unit.takes_turns:
                if output is not None and unit.saved_weights.are_in_use():
                    self._parameters.keep(unit)
                else:
                    unit.hide()
        if torch.is_grad_enabled():
            if unit.plan.is_needed_in_backward:
                watch_outputs(output, partial(self._parameters.gather, unit))
        elif has_ended:
            self._before_state_dict()  # nothing else would free it before the next forward
        dtype = unit.plan.precision.output_dtype
        return None if dtype is None else _cast(output, dtype)

    def _before_state_dict(self, *unused: Any) -> None:
        """Hides gathered parameters, unless the model runs, so that a state dict has this rank's shards."""
        if not self._root.num_running:
            self._parameters.settle()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a tree to `dtype`. Returns the same tree if all of them have it."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not tree_any(is_other, tree):
        return tree
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, tree)
