"""Parameters in shards, which units gather into memory that they share (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from ...base.memory_categories import Held
from ...base.parameters import keep_range, set_pending_view
from ...comm.lane import CommLane
from ...dist_checkpointing.global_view import whole_view
from ..model.initial_values import InitialValues
from ..plan import Plan
from .buffer import FlatBuffer
from .gathering import ParameterGathering, install_call_hooks
from .unit import Unit, UnitPhase


class ShardedParameters:
    """This rank's shards of all parameters, and the units that are gathered from them.

    Outside of forward, backward and `whole` the model's parameters have shapes and dtypes, and no values.

    Args:
        model: the model inside the wrapper.
        units: in the plan's order, the root last.
        buffers: own the shards.
        start: the initial values, of which those that exist are in the parameters.
        lane: runs the gathers.
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
        self._model, self._units = model, units
        self._shards = [buffer.shards for buffer in buffers if buffer.shards is not None]
        # Values that exist go into the shards first. What was on the meta device is then filled in, one tensor at a
        # time, into the shards too, while the parameters that it belongs to have no memory of their own.
        for unit in units:
            unit.adopt(with_values=True)
        self._note_ranges()
        start.fill()
        for unit in units:
            unit.adopt(with_values=False)
        # Tracks which units are gathered and the order in which they run. Module hooks call it in forward and backward
        # (`install_call_hooks`). Writes to the shards invalidate gathered units.
        self._gathering = ParameterGathering(
            plan, units, self._shards, lane, note_moved=note_moved, note_skipped=note_skipped
        )
        install_call_hooks(plan, units, self._gathering)
        for param in model.parameters():
            set_pending_view(param, partial(whole_view, param))

    def settle(self) -> None:
        """Hides all parameters: outside of forward and backward a rank may use only its shards."""
        self._gathering.settle()

    def invalidate(self) -> None:
        """Invalidates all gathered parameters, after the shards were written."""
        self._gathering.forget()

    def abandon(self) -> None:
        """Ends forwards that an exception has interrupted, and hides all parameters."""
        self._gathering.end_running()
        self._gathering.settle()

    def check_may_write(self) -> None:
        """Raises inside of `whole`, where the model shows copies of the shards."""
        self._gathering.find_writes(expected=True)

    def publish(self) -> None:
        """Does nothing: the next forward gathers the updated shards."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gathers all parameters into memory of their own, and takes what is written there into the shards."""
        if self._units[-1].phase is UnitPhase.APART:  # inside of another one
            yield
            return
        self._gathering.forget()
        for unit in self._units:
            unit.gather_apart()
            for param in unit.name_of:
                keep_range(param, None)
        try:
            yield
            self._gathering.find_writes()
        finally:
            for unit in self._units:
                unit.return_to_slot()
            self._note_ranges()
            self._gathering.forget()

    def held(self) -> dict[Held, list[Tensor]]:
        """Returns the memory of shards and buffers, and of what is gathered."""
        slots = {unit.slot for unit in self._units if unit.slot is not None}
        gathered = [*(part for slot in slots for part in slot.parts), *(part for u in self._units for part in u.part)]
        return {"parameters": [*self._shards, *self._model.buffers()], "gathered parameters": gathered}

    def _note_ranges(self) -> None:
        for unit in self._units:
            for param, shard, start in unit.local_ranges():
                keep_range(param, (shard, start))
