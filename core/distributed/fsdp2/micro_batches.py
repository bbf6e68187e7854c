"""Keeps units gathered from one micro-batch of a step to the next.

Between micro-batches a rank holds every gradient whole, until the last one reduces them. Compared with that, the units
that a micro-batch begins and ends with take little memory. Gathering them again takes long, because no computation
overlaps with those gathers.
"""

from __future__ import annotations

from ..plan import Plan
from .torch_private import as_fsdp


class KeptBetweenMicroBatches:
    """Sets, before each micro-batch, which units stay gathered after it; keeps no state but FSDP2's own settings.

    Args:
        plan: says of each unit, and of the root, whether it is kept (`UnitPlan.is_kept`).
    """

    def __init__(self, plan: Plan) -> None:
        kept = [unit for unit in plan.units if unit.is_kept]
        # Both lists are fixed; the settings of their modules change with each micro-batch, by `expect` alone.
        # Units not needed in backward stay gathered through it; the rest are gathered again in backward and kept.
        self._gathered_once = [
            as_fsdp(module)
            for unit in kept
            if unit.is_freed and not unit.is_needed_in_backward
            for module in unit.modules
        ]
        self._kept = [as_fsdp(module) for unit in kept for module in unit.modules]

    def expect(self, *, another_micro_batch: bool) -> None:
        """Prepares for a micro-batch; called before each.

        Args:
            another_micro_batch: the step has one after it, so that kept units are not freed.
        """
        for module in self._kept:
            module.set_reshard_after_backward(not another_micro_batch, recurse=False)
        for module in self._gathered_once:
            module.set_reshard_after_forward(not another_micro_batch, recurse=False)
