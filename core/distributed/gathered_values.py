"""Whether gathered parameters have the values of their shards, and what neighbouring ranks keep of them.

Both engines ask it: shards that were written make gathered parameters stale, and a gathered parameter that was
written would lose the write with the gathered copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..base._torch_compat import NO_BACKWARD, current_backward
from ..base.errors import UnitError
from ..comm import streams


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
