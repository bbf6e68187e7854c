"""Gathers units ahead of their use, in the order in which the model really uses them.

Predicts the next unit of a forward from the last forward, and of a backward from its own forward in reverse. A wrong
prediction costs a late gather and changes no number.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...base._torch_compat import NO_BACKWARD, current_backward
from ..plan import Plan
from .torch_private import as_fsdp


class Prefetcher:
    """Sets, whenever a unit is about to run, which units FSDP2 gathers meanwhile.

    Args:
        plan: of the sharded model, a forward of which begins a new order. A unit is known by its first module. What
            backward recomputes counts as backward.
    """

    def __init__(self, plan: Plan) -> None:
        self._forward_depth, self._backward_depth = plan.forward_prefetch, plan.backward_prefetch  # fixed
        units = {unit.modules[0]: unit for unit in plan.units[:-1]}
        # The units whose backward reads their weights; fixed.
        self._gathered_in_backward = {module for module, unit in units.items() if unit.is_needed_in_backward}
        # The units of the running forward, or of the last one, in the order in which they ran. Grows in `_enter`;
        # backward reads it. `end_order` moves it to `_last_order`: when a forward of the root begins, or on reshard.
        self._order: list[nn.Module] = []
        # Units of the previous forward, in order: the prediction for the current one. `end_order` sets it. Empty until
        # the second forward.
        self._last_order: list[nn.Module] = []
        # Units of `_order` whose output needs a gradient, so that backward runs through them. Grows in `_leave`, is
        # cleared when a forward of the root begins.
        self._reached_by_backward: set[nn.Module] = set()
        (root,) = plan.root.modules
        # Before FSDP2's own hooks, which read what is set here.
        root.register_forward_pre_hook(self._begin, prepend=True)
        root.register_forward_hook(self._end)
        for unit in units:
            unit.register_forward_pre_hook(self._enter, prepend=True)
            unit.register_forward_hook(self._leave)

    def end_order(self) -> None:
        """Keeps the order of the last forward as what to expect. The next module to run begins a new order."""
        self._last_order, self._order = self._order or self._last_order, []

    def _begin(self, root: nn.Module, args: Any) -> None:
        if not _is_in_backward():
            self.end_order()
            self._reached_by_backward.clear()
            self._set_forward(root, self._last_order[: self._forward_depth])

    def _end(self, root: nn.Module, args: Any, output: Any) -> None:
        if not _is_in_backward():
            self._set_backward(root, len(self._order))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _is_in_backward():  # recomputation of a checkpointed module: on the way back
            self._set_forward(module, self._used_before(module, _last_index(self._order, module)))
            return
        position = len(self._order)
        self._order.append(module)
        self._set_forward(module, self._expected_after(module, position))
        self._set_backward(module, position)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Below the first trained weight, as under adapters, nothing needs a gradient. A forward without gradients may
        # be that of a checkpoint, which backward recomputes: then assume that backward reaches it.
        needs_gradient = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if needs_gradient or not torch.is_grad_enabled():
            self._reached_by_backward.add(module)

    def _set_forward(self, module: nn.Module, ahead: list[nn.Module]) -> None:
        as_fsdp(module).set_modules_to_forward_prefetch([as_fsdp(unit) for unit in ahead])

    def _set_backward(self, module: nn.Module, position: int) -> None:
        # An empty list would mean FSDP2's default, the unit before; a unit that is gathered already means none.
        ahead = self._used_before(module, position) or [module]
        as_fsdp(module).set_modules_to_backward_prefetch([as_fsdp(unit) for unit in ahead])

    def _expected_after(self, module: nn.Module, position: int) -> list[nn.Module]:
        last = self._last_order
        if not (position < len(last) and last[position] is module):
            position = _last_index(last, module)
        return last[position + 1 : position + 1 + self._forward_depth]

    def _used_before(self, module: nn.Module, position: int) -> list[nn.Module]:
        """Returns the units that backward reaches after `module`, nearest first."""
        gathered = self._gathered_in_backward & self._reached_by_backward - {module}
        before = (unit for unit in reversed(self._order[:position]) if unit in gathered)
        return list(islice(before, self._backward_depth))


def _last_index(order: list[nn.Module], module: nn.Module) -> int:
    """Returns the last index of `module` in `order`, or its length where it is absent."""
    return next((index for index in reversed(range(len(order))) if order[index] is module), len(order))


def _is_in_backward() -> bool:
    return current_backward() != NO_BACKWARD
