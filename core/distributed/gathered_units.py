"""What both engines do about gathered units: which to gather ahead, whether they were written, and what ranks keep.

* `UnitOrder` predicts the next unit of a forward from the last forward, and of a backward from its own forward in
  reverse. A wrong prediction costs a late gather, or one too many, and changes no number.
* `WriteCounts`: shards that were written make gathered parameters stale, and a gathered parameter that was written
  would lose the write with the gathered copy.
* `KeptPart` is what neighbouring ranks keep of a unit between its forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from ..base._torch_compat import NO_BACKWARD, current_backward
from ..base.errors import UnitError
from ..comm import streams
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


class WriteCounts:
    """Finds tensors that were written in place.

    Args:
        count: returns torch's count of writes to each tensor (``_version``), which costs nothing to read.
    """

    def __init__(self, count: Callable[[], Sequence[int]]) -> None:
        # Fixed: reads what an engine holds.
        self._count = count
        # Counts at the last `find`, which replaces them.
        self._last = count()

    def find(self) -> list[int]:
        """Returns the indices of the tensors that were written since the last call."""
        before, self._last = self._last, self._count()
        if before == self._last:
            return []
        return [index for index, (old, new) in enumerate(zip(before, self._last, strict=True)) if old != new]


def lost_write(name: str, remedy: str) -> UnitError:
    """Returns the error for a parameter that was written while it was gathered.

    Args:
        remedy: when and where to write parameters.
    """
    return UnitError(
        f"parameter {name} was written while its unit was gathered, between a forward and the end of its step, and "
        f"the write would be lost; write parameters {remedy}"
    )


class KeptPart:
    """This rank's part of one unit, which `ranks` keep whole together between its forward and backward.

    Args:
        ranks: neighbours in the unit's group of shards; each keeps an equal part.
        outlasts_backward: keep the part for the next micro-batch, which finds the unit gathered.
    """

    def __init__(self, ranks: ProcessGroup, *, outlasts_backward: bool = False) -> None:
        # Both fixed: the neighbours, and whether the plan keeps the unit between micro-batches.
        self.ranks, self._outlasts_backward = ranks, outlasts_backward
        # Memory of our own, on the stream of `keep`, which a forward calls once the unit is gathered; `take` clears it
        # in backward, or `drop`, when shards may have changed.
        self.tensor: Tensor | None = None
        # Behind the copy into `tensor`, which another stream may read; None on a CPU. Set with `tensor`.
        self._is_written: Any = None

    def keep(self, whole: Tensor) -> None:
        """Keeps this rank's part of a unit that has been gathered."""
        self.tensor = whole.chunk(self.ranks.size())[self.ranks.rank()].clone()
        self._is_written = streams.record_event() if streams.is_asynchronous(whole.device) else None

    def take(self) -> Tensor | None:
        """Returns the part, for a gather on the current stream, or None if there is none."""
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
