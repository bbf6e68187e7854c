"""Guards the gathered weights of units: notices writes to them, and keeps those of freed units readable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import ShardstackError, UnitError, warn_once
from ..plan import UnitPlan
from ..saved_weights import SavedWeights, in_use_message
from .torch_private import TorchState, as_fsdp, gathered_tensors_of, mark_gathered_parameter, name_of_parameter

_UNWRITTEN = 0
"""Version of a gathered parameter that only torch's gather has written."""


class GatheredValues:
    """Compares versions of shards and of gathered parameters from one forward of a sharded model to the next.

    A version is torch's count of in-place writes to a tensor, an integer that costs nothing to read.

    Args:
        state: of the sharded model.
    """

    def __init__(self, state: TorchState) -> None:
        # What torch holds of the sharded model; read only.
        self._state = state
        # Versions of shards at the last `are_stale`, which replaces them.
        self._of_shards = state.shard_versions()
        # Versions of gathered parameters at the last `check_unwritten`, which replaces them. A parameter is here once
        # it has been gathered.
        self._of_gathered: dict[Any, int] = {}

    def are_stale(self) -> bool:
        """Returns whether a shard was written (an optimizer's step, a load) since the last call."""
        before, self._of_shards = self._of_shards, self._state.shard_versions()
        return before != self._of_shards

    def check_unwritten(self) -> None:
        """Raises where a parameter was written while it was gathered: the write would be lost with the gathered copy.

        Marks those gathered for the first time, so that the step of an optimizer built from them raises.

        Raises:
            UnitError: names the parameter.
        """
        before, self._of_gathered = self._of_gathered, self._state.gathered_versions()
        for parameter in self._of_gathered.keys() - before.keys():
            mark_gathered_parameter(parameter)
        for parameter, version in self._of_gathered.items():
            if version != before.get(parameter, _UNWRITTEN):
                raise UnitError(
                    f"parameter {name_of_parameter(parameter)} was written while its unit was gathered, between a "
                    "forward and the end of its step, and the write would be lost; write parameters after "
                    "optimizer.step() and before the next forward, when the module shows its shards"
                )


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
        return gathered_tensors_of(self._module)

    def _gather(self) -> None:
        reject_graph_of_gradients(f"unit {' + '.join(self._unit.names)}")
        if not self._unit.is_needed_in_backward:
            self._module.set_unshard_in_backward(True)  # it is, in this model
        self._module.unshard()
