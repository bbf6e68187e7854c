"""Keeps weights that autograd has saved readable, after torch has freed their unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import ShardstackError, warn_once
from ..model.forward_hooks import SavedWeights, in_use_message
from ..plan import UnitPlan
from . import torch_private
from .torch_private import as_fsdp


def reject_graph_of_gradients(reached: str) -> None:
    """Raises in a backward whose gradients keep a graph.

    Args:
        reached: what the backward has reached, for the message.

    Raises:
        ShardstackError: says what to use instead.
    """
    if torch.is_grad_enabled() and current_backward() != NO_BACKWARD:
        raise ShardstackError(
            f"a backward with create_graph=True reached {reached} under FSDP2, which frees parameters during "
            "backward, so that no second backward could go through it; use DistributedDataParallel for losses that "
            "contain gradients"
        )


class FreedWeights:
    """`SavedWeights` of one unit, whose gathered weights torch frees after each forward.

    A unit stays gathered after its forwards from the first one on that leaves a view of a weight in use.

    Args:
        unit: the unit, sharded.

    Raises:
        ShardstackError: in a backward whose gradients keep a graph (``create_graph=True``).
    """

    def __init__(self, unit: UnitPlan) -> None:
        self._unit, self._module = unit, as_fsdp(unit.modules[0])
        # Hooks of autograd around each forward; they live as long as the module.
        self._saved = SavedWeights(self._memory, self._gather)
        for module in unit.modules:
            module.register_forward_pre_hook(self._before)  # after torch has gathered
            module.register_forward_hook(self._after, prepend=True, always_call=True)  # before torch frees

    def end_all(self) -> None:
        """Ends forwards that were interrupted."""
        self._saved.end_all()

    def _before(self, module: nn.Module, args: Any) -> None:
        self._saved.begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.end()
        if current_backward() == NO_BACKWARD and output is not None and self._saved.are_in_use():
            warn_once(in_use_message(" + ".join(self._unit.names)))
            self._module.set_reshard_after_forward(False, recurse=False)

    def _memory(self) -> Sequence[torch.Tensor]:
        return torch_private.gathered_tensors_of(self._module)

    def _gather(self) -> None:
        reject_graph_of_gradients(f"unit {' + '.join(self._unit.names)}")
        if not self._unit.is_needed_in_backward:
            self._module.set_unshard_in_backward(True)  # it is, in this model
        self._module.unshard()
