"""A torch optimizer whose state is saved under the names that the optimizers of `core.optimizer` use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dist_checkpointing import global_view
from ...errors import CheckpointError
from ...optimizer.optimizer_state import scalars_of


class TorchOptimizer:
    """Steps a torch optimizer over whole parameters or DTensors, and names its state by parameter.

    Moments are tensors ``<kind>.<parameter>``, as those of `MegatronOptimizer`, so that another sharding and another
    number of ranks continue from them.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names = {parameter: name for name, parameter in reversed(list(model.named_parameters()))}
        # Trained parameters by name; fixed.
        self._named = {names[p]: p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}

    def step(self) -> tuple[bool, float | None, int | None]:
        """Updates the parameters; returns what `MegatronOptimizer.step` does, without a norm."""
        self.optimizer.step()
        return True, None, None

    def create(self, kinds: Iterable[str]) -> None:
        """Creates moments of these kinds, as zeros, where there are none yet, for a checkpoint to fill."""
        for parameter in self._named.values():
            for kind in kinds:
                if kind not in self.optimizer.state[parameter]:
                    self.optimizer.state[parameter][kind] = torch.zeros_like(parameter)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the moments that exist, as tensors of the whole model, which share this rank's storage.

        Raises:
            CheckpointError: a state in another shape than its parameter's.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or _is_count(kind, value, parameter):
                    continue
                if value.shape != parameter.shape:
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {kind} of parameter {name} in the shape "
                        f"{list(value.shape)}, and checkpoints hold state in the parameter's, "
                        f"{list(parameter.shape)}; use an optimizer that keeps it so, as AdamW does"
                    )
                found[f"{kind}.{name}"] = global_view(parameter, value)
        return found

    def state_scalars(self) -> dict[str, Any]:
        """Returns the step count, and the parameters that deviate from it, as JSON."""
        return scalars_of({name: self._count(parameter) for name, parameter in self._named.items()}, {})

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Sets the step counts, once the moments are loaded."""
        if isinstance(self.optimizer, torch.optim.SGD):  # counts nothing
            return
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        for name, parameter in self._named.items():
            state = self.optimizer.state.get(parameter)
            if state:
                count = float(scalars["step_of"].get(name, scalars["step"]))
                state["step"] = torch.tensor(count, device=parameter.device if on_device else "cpu")

    def _count(self, parameter: nn.Parameter) -> int:
        return int(self.optimizer.state.get(parameter, {}).get("step", 0))


def _is_count(kind: str, value: Tensor, parameter: nn.Parameter) -> bool:
    return kind == "step" and value.numel() == 1
