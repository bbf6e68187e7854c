"""What both engines do about gathered units: which to gather ahead, whether they were written, and what ranks keep.

* `UnitOrder` predicts the next unit of a forward from the last forward, and of a backward from its own forward in
  reverse. A wrong prediction costs a late gather, or one too many, and changes no number.
* `WriteCounts`: shards that were written make gathered parameters stale, and a gathered parameter that was written
  would lose the write with the gathered copy.
* `KeptPart` is what neighbouring ranks keep of a unit between its forward and backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import UnitError
from ...comm import streams
from ..plan import Plan, UnitPlan

Unit = TypeVar("Unit")
"""What an engine knows a unit by."""


class UnitOrder(Generic[Unit]):
    """The order in which a model runs its units. The model itself is not one of them.

    An engine calls `begin`, `enter` and `leave` on the thread of the forward, and when backward computes a forward
    again on that of the backward, which counts as backward.

    A program may drop the output of a unit on some ranks alone. There backward never reaches the unit, and `reach`
    lets the engine do in its place what other ranks do. With `gather_skipped_units` a program may also leave a unit
    out of forward, and `skipped_before` says where.

    Args:
        plan: says how many units are gathered ahead.
        units: in the plan's order, each with its plan.
        pass_by: takes the place of a unit's backward: called when it would begin (True), and when it would end.
    """

    def __init__(self, plan: Plan, units: Mapping[Unit, UnitPlan], pass_by: Callable[[Unit, bool], None]) -> None:
        # `_planned_units` is empty without `gather_skipped_units`.
        self._pass_by, self._units = pass_by, units
        self._planned_units = list(units) if plan.settings.gather_skipped_units else []
        self._forward_depth, self._backward_depth = plan.settings.forward_prefetch, plan.settings.backward_prefetch
        self._needed_in_backward = {unit for unit, unit_plan in units.items() if unit_plan.is_needed_in_backward}
        # The units of the running forward, or of the last one, in the order in which they ran. Grows in `enter`;
        # backward reads it. `end` moves it to `_last_order`: when a forward of the model begins, or shards change.
        self._order: list[Unit] = []
        # Units of the previous forward, in order: the prediction for the current one. `end` sets it. Empty until the
        # second forward.
        self._last_order: list[Unit] = []
        # Units of `_order` whose output needs a gradient, so that backward runs through them. Grows in `leave`, is
        # cleared when a forward of the model begins.
        self._reached_by_backward: set[Unit] = set()
        # The running forward, or the last one: a unit where it begins (None), and where it ends with a mark that the
        # graphs of its output and of its first weight hold. Grows in `enter` and `leave`; `end_step` clears it.
        self._trace: list[tuple[Unit, weakref.ref[_GraphMark] | None]] = []
        # The backward that `reach` was last called in, the places in `_trace` that it has still to pass by, in
        # ascending order, the units that it has reached, and whether it is passing one by. `reach` sets all.
        self._reached_in, self._to_pass = NO_BACKWARD, list[int]()
        self._reached_units, self._is_passing = set[Unit | None](), False
        # Whether the output of a unit needed a gradient when it last ran. `leave` sets it.
        self._needed_gradient: dict[Unit, bool] = {}
        # Place in `_planned_units` of the next unit of the running forward, None outside of one. `begin`, `enter` and
        # the end of `skipped_before` set it.
        self._next: int | None = None

    def begin(self) -> list[Unit]:
        """Begins a forward of the model. Returns the units to gather meanwhile."""
        self.end_step()
        self._reached_by_backward.clear()
        self._next = 0 if self._planned_units else None
        return self._last_order[: self._forward_depth]

    def end(self) -> None:
        """Keeps the order of the last forward as what to expect. The next unit to run begins a new order."""
        self._last_order, self._order = self._order or self._last_order, []

    def end_step(self) -> None:
        """Ends an order as `end` does, with no backward to follow."""
        self.end()
        self._trace.clear()

    def leave_model(self) -> None:
        """Ends a forward of the model, which may have raised. Later calls of units do not belong to that forward."""
        self._next = None

    def enter(self, unit: Unit) -> list[Unit]:
        """Begins a unit's forward, or the recomputation in backward. Returns the units to gather meanwhile."""
        if current_backward() != NO_BACKWARD:
            return self.before(unit)
        if not self._order or self._order[-1] is not unit:
            self._order.append(unit)
        self._trace.append((unit, None))
        if self._next is not None:
            self._next = self._planned_units.index(unit) + 1
        position, last = len(self._order) - 1, self._last_order
        if not (position < len(last) and last[position] is unit):
            position = _last_index(last, unit)
        return last[position + 1 : position + 1 + self._forward_depth]

    def leave(self, unit: Unit, output: Any, parameters: Iterable[Tensor]) -> None:
        """Ends a unit's forward, which returned `output`. Its parameters are still gathered."""
        # Below the first trained weight, as under adapters, nothing needs a gradient. A forward without gradients may
        # be that of a checkpoint, which backward computes again: then assume that backward reaches it.
        nodes: list[Any] = [
            leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if nodes or not torch.is_grad_enabled():
            self._reached_by_backward.add(unit)
        if torch.is_grad_enabled():
            self._needed_gradient[unit] = bool(nodes)
        is_traced = torch.is_grad_enabled() and current_backward() == NO_BACKWARD and not torch.compiler.is_compiling()
        if nodes and None not in nodes and is_traced:
            mark = _GraphMark()
            if (weight := next((p for p in parameters if p.requires_grad), None)) is not None:
                view: Any = weight.view_as(weight)
                # Mark the weight's own node too: a program may use the weight outside the unit. All graphs that live
                # share that node.
                view.grad_fn.next_functions[0][0].metadata[_GraphMark] = [mark]
            for node in nodes:
                node.metadata.setdefault(_GraphMark, []).append(mark)  # several units may return one tensor
            self._trace.append((unit, weakref.ref(mark)))

    def skipped_before(self, unit: Unit | None = None) -> Iterator[Unit]:
        """Yields the units between the last one and `unit`, which the running forward skips.

        The engine gathers each as if it ran, with `enter` and `leave_skipped`, before it gathers `unit`.

        Args:
            unit: None is the end of the forward.

        Raises:
            UnitError: a unit runs a second time, after one that the model holds behind it, or inside another.
        """
        if self._next is None or current_backward() != NO_BACKWARD or (self._order and self._order[-1] is unit):
            return
        place = len(self._planned_units) if unit is None else self._planned_units.index(unit)
        if place < self._next:
            name, before = (self._units[self._planned_units[p]].names[0] for p in (place, self._next - 1))
            raise UnitError(
                f"unit {name} runs after unit {before}, and gather_skipped_units takes units that run once in a call "
                "of the model (self(...), not self.forward(...)), in the order in which the model holds them, none "
                "inside another; drop it, and name in replicated what ranks skip"
            )
        while self._next < place:
            yield self._planned_units[self._next]
        if unit is None:
            self._next = None

    def leave_skipped(self, unit: Unit) -> None:
        """Ends the place of a unit that this forward skips."""
        is_trained = any(piece.is_trained for piece in self._units[unit].pieces)
        if not torch.is_grad_enabled():
            self._reached_by_backward.add(unit)
        elif self._needed_gradient.get(unit, is_trained):
            self._reached_by_backward.add(unit)
            self._trace.append((unit, _NO_GRAPH))

    def reach(self, unit: Unit | None = None) -> None:
        """Lets the engine catch up with ranks whose backward has run through units that a program has dropped here.

        Call it before the backward of `unit` gathers anything. None is the end of a backward.
        """
        if self._is_passing:
            return
        if self._reached_in != current_backward():
            self._reached_in, self._to_pass, self._reached_units = current_backward(), self._find_dropped(), set()
            if self._to_pass:
                torch.autograd.Variable._execution_engine.queue_callback(self.reach)
        self._reached_units.add(unit)
        if not self._to_pass:
            return
        places = (p for p in reversed(range(len(self._trace))) if self._trace[p][0] is unit and self._trace[p][1])
        reached = -1 if unit is None else next(places, len(self._trace))
        while self._to_pass and self._to_pass[-1] > reached:
            passed_unit, mark = self._trace[self._to_pass.pop()]
            # It is reached again as after a forward whose output nothing used, between this one and now.
            if passed_unit not in self._reached_units:
                self._is_passing = True
                try:
                    self._pass_by(passed_unit, mark is not None)
                finally:
                    self._is_passing = False

    def _find_dropped(self) -> list[int]:
        """Returns the places in `_trace` of units whose outputs have no graph any more, as no backward can need it."""
        are_dropped = defaultdict[Unit, list[bool]](list)
        for unit, mark in self._trace:
            if mark is not None:
                are_dropped[unit].append(mark() is None)
        return [place for place, (unit, _) in enumerate(self._trace) if are_dropped[unit] and all(are_dropped[unit])]

    def before(self, unit: Unit | None = None) -> list[Unit]:
        """Returns the units to gather while the backward of `unit`, or of the loss (None), runs, nearest first."""
        order, needed = self._order, self._needed_in_backward & self._reached_by_backward - {unit}
        position = len(order) if unit is None else _last_index(order, unit)
        return list(islice((each for each in reversed(order[:position]) if each in needed), self._backward_depth))


class _GraphMark:
    """An object that graphs of one forward of a unit hold, and nothing else. It dies when the last of them is freed.

    Graphs share the node of a weight. One of an earlier forward that still lives keeps the mark of the last one too.
    """


_NO_GRAPH = weakref.ref(_GraphMark())
"""The mark of an output that was never made."""


def _last_index(order: list[Unit], unit: Unit) -> int:
    """Returns the last index of `unit` in `order`, or its length where it is absent."""
    return next((index for index in reversed(range(len(order))) if order[index] is unit), len(order))


class WriteCounts:
    """Finds tensors that were written in place.

    Args:
        count: returns torch's count of writes to each tensor (``_version``), which costs nothing to read.
    """

    def __init__(self, count: Callable[[], Sequence[int]]) -> None:
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
        # in backward; the engine does when no backward follows, or shards may have changed.
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
