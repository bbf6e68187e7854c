"""What stays gathered from one micro-batch of a step to the next.

Between micro-batches a rank holds every gradient whole, until the last one reduces them. Beside that, what a
micro-batch begins and ends with is little memory, and gathering it again each time is much waiting: nothing runs yet,
or anymore, that a gather could hide behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..model.units import Unit


class KeptBetweenMicroBatches:
    """What of a sharded model stays gathered from one micro-batch of a step to the next.

    Args:
        root: the sharded model.
        units: as `shard_model` returned them.
        which: as in the config: ``none``, ``ends`` or ``all``.

    Attributes:
        modules: the FSDP modules that stay gathered.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], which: str) -> None:
        kept = units if which == "all" else units_at_the_ends(units) if which == "ends" else ()
        modules = [module for unit in kept for module in unit.modules]
        self.modules: frozenset[nn.Module] = frozenset([*modules, root] if which != "none" else [])
        # Whose backward does not gather them stay through it; the others come back for it, and stay from there.
        self._gathered_once = _as_fsdp(
            module
            for unit in kept
            if unit.reshard_after_forward is True and not unit.is_needed_in_backward
            for module in unit.modules
        )
        self._kept = _as_fsdp(self.modules)

    def expect(self, *, another_micro_batch: bool) -> None:
        """To be told before each micro-batch whether the step has another one after it."""
        for module in self._kept:
            module.set_reshard_after_backward(not another_micro_batch, recurse=False)
        for module in self._gathered_once:
            module.set_reshard_after_forward(not another_micro_batch, recurse=False)


def units_at_the_ends(units: Sequence[Unit]) -> list[Unit]:
    """The units that a micro-batch begins and ends with, and those that no backward gathers.

    The first is in memory when a backward ends and a forward begins, the last when a forward ends and a backward
    begins.
    """
    whole = [unit for unit in units if not unit.is_minority]
    in_backward = [unit for unit in whole if unit.is_needed_in_backward]
    ends = [*in_backward[:1], *whole[-1:]]
    return [unit for unit in units if unit in ends or not unit.is_needed_in_backward]


def _as_fsdp(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
