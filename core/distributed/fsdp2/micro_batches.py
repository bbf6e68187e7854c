"""What stays gathered from one micro-batch of a step to the next.

Between micro-batches a rank holds every gradient whole, until the last one reduces them. Beside that, what a
micro-batch begins and ends with is little memory, and gathering it again each time is much waiting: nothing runs yet,
or anymore, that a gather could hide behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..plan import FSDP2Plan


class KeptBetweenMicroBatches:
    """What of a sharded model stays gathered from one micro-batch of a step to the next.

    Args:
        plan: its units, and the root, say whether they are kept.
    """

    def __init__(self, plan: FSDP2Plan) -> None:
        kept = [unit for unit in (*plan.units, plan.root) if unit.is_kept]
        # Whose backward does not gather them stay through it; the others come back for it, and stay from there.
        self._gathered_once = _as_fsdp(
            module for unit in kept if unit.is_freed and not unit.is_needed_in_backward for module in unit.modules
        )
        self._kept = _as_fsdp(module for unit in kept for module in unit.modules)

    def expect(self, *, another_micro_batch: bool) -> None:
        """Says, before each micro-batch, whether the step has another one after it."""
        for module in self._kept:
            module.set_reshard_after_backward(not another_micro_batch, recurse=False)
        for module in self._gathered_once:
            module.set_reshard_after_forward(not another_micro_batch, recurse=False)


def _as_fsdp(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
