"""Lists all names of a model's parameters, and the place of each name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...tensor_parallel.layers import ColumnParallelLinear
from .values import ParamPlan


class ParameterNames:
    """The names of a model's parameters; a tied parameter has several.

    A GPT's embedding weight that its output projection borrows is also listed under the projection's name.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        # Filled here, then fixed: the names of each parameter, its first one first.
        self.of: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, parameter in named:
            self.of[parameter] = (*self.of.get(parameter, ()), name)
        names = [name for name, _ in named]
        borrowers = [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, ColumnParallelLinear) and module.weight is None
        ]
        for parameter in self.of:
            if getattr(parameter, "shared_embedding", False):
                self.of[parameter] = (*self.of[parameter], *borrowers)
        # The place of each name, borrowed ones last; fixed.
        self._place = {name: place for place, name in enumerate([*names, *borrowers])}

    def plan_of(self, parameter: nn.Parameter, **cut: Any) -> ParamPlan:
        """Returns the plan of a parameter; `cut` holds the fields `shape`, `cut` and `bounds`."""
        names = self.of[parameter]
        return ParamPlan(
            names=names,
            places=tuple(self._place[name] for name in names),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            **cut,
        )

    def position(self, parameter: nn.Parameter) -> int:
        """Returns a parameter's place among the model's parameters, which is roughly the order of execution."""
        return self._place[self.of[parameter][0]]
