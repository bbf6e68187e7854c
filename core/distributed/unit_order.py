"""Predicts the units that a forward or backward needs next, to gather them ahead, in either engine.

Predicts the next unit of a forward from the last forward, and of a backward from its own forward in reverse. A wrong
prediction costs a late gather, or one too many, and changes no number.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ..base._torch_compat import NO_BACKWARD, current_backward
from .plan import Plan

Unit = TypeVar("Unit")
"""What an engine knows a unit by."""


class UnitOrder(Generic[Unit]):
    """The order in which a model runs its units. The model itself is not one of them.

    An engine calls `begin`, `enter` and `leave` on the thread of the forward, and when backward computes a forward
    again on that of the backward, which counts as backward.

    Args:
        plan: says how many units are gathered ahead.
        needed_in_backward: the units whose backward reads their weights.
    """

    def __init__(self, plan: Plan, needed_in_backward: Collection[Unit]) -> None:
        # All fixed.
        self._forward_depth, self._backward_depth = plan.forward_prefetch, plan.backward_prefetch
        self._needed_in_backward = set(needed_in_backward)
        # The units of the running forward, or of the last one, in the order in which they ran. Grows in `enter`;
        # backward reads it. `end` moves it to `_last_order`: when a forward of the model begins, or shards change.
        self._order: list[Unit] = []
        # Units of the previous forward, in order: the prediction for the current one. `end` sets it. Empty until the
        # second forward.
        self._last_order: list[Unit] = []
        # Units of `_order` whose output needs a gradient, so that backward runs through them. Grows in `leave`, is
        # cleared when a forward of the model begins.
        self._reached_by_backward: set[Unit] = set()

    def begin(self) -> list[Unit]:
        """Begins a forward of the model. Returns the units to gather meanwhile."""
        self.end()
        self._reached_by_backward.clear()
        return self._last_order[: self._forward_depth]

    def end(self) -> None:
        """Keeps the order of the last forward as what to expect. The next unit to run begins a new order."""
        self._last_order, self._order = self._order or self._last_order, []

    def enter(self, unit: Unit) -> list[Unit]:
        """Begins a unit's forward, or in backward its computation again. Returns the units to gather meanwhile."""
        if current_backward() != NO_BACKWARD:
            return self.before(unit)
        if not self._order or self._order[-1] is not unit:
            self._order.append(unit)
        position, last = len(self._order) - 1, self._last_order
        if not (position < len(last) and last[position] is unit):
            position = _last_index(last, unit)
        return last[position + 1 : position + 1 + self._forward_depth]

    def leave(self, unit: Unit, output: Any) -> None:
        """Ends a unit's forward, which returned `output`."""
        # Below the first trained weight, as under adapters, nothing needs a gradient. A forward without gradients may
        # be that of a checkpoint, which backward computes again: then assume that backward reaches it.
        needs_gradient = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if needs_gradient or not torch.is_grad_enabled():
            self._reached_by_backward.add(unit)

    def before(self, unit: Unit | None = None) -> list[Unit]:
        """Returns the units to gather while the backward of `unit` runs, nearest first. None is that of the loss."""
        order, needed = self._order, self._needed_in_backward & self._reached_by_backward - {unit}
        position = len(order) if unit is None else _last_index(order, unit)
        return list(islice((each for each in reversed(order[:position]) if each in needed), self._backward_depth))


def _last_index(order: list[Unit], unit: Unit) -> int:
    """Returns the last index of `unit` in `order`, or its length where it is absent."""
    return next((index for index in reversed(range(len(order))) if order[index] is unit), len(order))
