"""Gathers units ahead of their use under FSDP2: sets torch's lists of prefetches in the order of the last forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils._pytree import tree_leaves

from ...base._torch_compat import NO_BACKWARD, current_backward
from ..engine.gathered_units import UnitOrder
from ..model.forward_hooks import enclose, watch_outputs
from ..plan import Plan
from . import torch_private
from .torch_private import as_fsdp


class UnitPrefetch:
    """Hooks on the units of a sharded model, before FSDP2's own, which read what is set here.

    Methods that the plan names gather their module and are followed as `forward` is. A unit is known by its first
    module. Hooks are never removed: they live as long as the model.

    Args:
        prepare: called before such a method, as before a forward of the model.
        finish: called after it.

    Attributes:
        order: the order of units, which the hooks keep up to date.

    Raises:
        WrapError: the plan names a method that no unit has.
    """

    def __init__(self, plan: Plan, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        self._prepare, self._finish = prepare, finish
        self._units = {unit.modules[0]: unit for unit in plan.units[:-1]}
        self._model, self._gathers_skipped = plan.root.modules[0], plan.settings.gather_skipped_units
        # Units whose inputs needed no gradient when they last ran: torch reduces them when the backward ends.
        # `_enter` keeps it up to date. Of units that have not run yet the first one counts, of which ranks may differ.
        self._first: set[nn.Module] = {*[*self._units][:1]}
        # Units that a backward has passed by since the last forward began. `_pass_by` adds, `_begin` clears.
        self._passed: set[nn.Module] = set()
        # The backward at whose end `_end_units` is called. `_reach_backward` sets it, on the thread of the backward.
        self._ends_in = NO_BACKWARD
        self.order = UnitOrder(plan, self._units, self._pass_by)
        # Hooks on outputs run in the order in which they are set: these before torch's, which gather a unit.
        for module in (*self._units, self._model):
            module.register_forward_hook(self._reach, prepend=True)
        self._model.register_forward_pre_hook(self._begin, prepend=True)
        self._model.register_forward_hook(self._end)
        for unit in self._units:
            unit.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        for module, names in plan.find_forward_methods().items():
            for name in names:
                self._follow(module, name)

    # ---- forward

    def _begin(self, *unused: Any) -> None:
        if current_backward() == NO_BACKWARD:
            self._passed.clear()
            _set_forward(self._model, self.order.begin())

    def _end(self, *unused: Any) -> None:
        if current_backward() == NO_BACKWARD:
            self._gather_skipped()
            self.order.leave_model()
            _set_backward(self._model, self.order.before())

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_backward() == NO_BACKWARD:
            self._gather_skipped(module)
            if torch.is_grad_enabled():
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                (self._first.discard if any(leaf.requires_grad for leaf in inputs) else self._first.add)(module)
        self._begin_forward(module)

    def _begin_forward(self, module: nn.Module) -> None:
        _set_forward(module, self.order.enter(module))
        if current_backward() == NO_BACKWARD:
            _set_backward(module, self.order.before(module))

    def _gather_skipped(self, module: nn.Module | None = None) -> None:
        """Gathers the units that this forward skips before a unit, or before its end."""
        for skipped in self.order.skipped_before(module):
            self._begin_forward(skipped)
            torch_private.gather_for_forward(as_fsdp(skipped))
            self.order.leave_skipped(skipped)

    def _follow(self, module: nn.Module, name: str) -> None:
        """Replaces a method by one that gathers the module, and is followed as its forward is."""

        def begin(_: None, args: Any, kwargs: Any) -> None:
            self._prepare()
            if module is self._model:
                self._begin()
            elif module in self._units:
                self._enter(module, args, kwargs)

        def end(_: None, args: Any, output: Any) -> None:
            if module is self._model:
                if output is not None:
                    self._end()
                self.order.leave_model()
            self._finish()

        # Hooks on outputs run in the order in which they are set: this one before torch's, which gathers the module.
        reach = partial(self._reach, module)
        setattr(module, name, enclose(getattr(module, name), lambda *unused: None, lambda _, *call: reach(*call)))
        fsdp.register_fsdp_forward_method(module, name)
        setattr(module, name, enclose(getattr(module, name), begin, end))

    # ---- backward

    def _reach(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._units:
            self.order.leave(module, output, module.parameters())
        if current_backward() == NO_BACKWARD:
            watch_outputs(output, partial(self._reach_backward, module))

    def _reach_backward(self, module: nn.Module, gradient: Any) -> None:
        self.order.reach(module)
        if self._gathers_skipped and self._ends_in != current_backward():
            self._ends_in = current_backward()
            # Before torch's own, which its hook on this output queues next: callbacks run in the order of queueing.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_units)

    def _end_units(self) -> None:
        # Torch would reduce the root before a first unit. Ranks that took another one for the first do not.
        for module in reversed(self._units):
            torch_private.end_backward(as_fsdp(module))

    def _pass_by(self, module: nn.Module, begins: bool) -> None:
        """Takes the place of the backward of a unit that does not reach it on this rank."""
        if begins:
            # Where others have run the unit, the one after it has an input with a gradient, and is reduced before.
            for before in self._units:
                if before in self._first and before not in self._passed:
                    torch_private.end_backward(as_fsdp(before))
            self._passed.add(module)
            torch_private.begin_backward(as_fsdp(module))
        elif module not in self._first:
            torch_private.end_backward(as_fsdp(module))


def _set_forward(module: nn.Module, ahead: list[nn.Module]) -> None:
    as_fsdp(module).set_modules_to_forward_prefetch([as_fsdp(unit) for unit in ahead])


def _set_backward(module: nn.Module, ahead: list[nn.Module]) -> None:
    # An empty list would mean FSDP2's default, the unit before; a unit that is gathered already means none.
    as_fsdp(module).set_modules_to_backward_prefetch([as_fsdp(unit) for unit in ahead or [module]])
