"""What a guard is: one guarantee of every wrapper, which raises where it cannot be kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from ..engine.engine import Engine
from ..groups import DataParallelGroups
from ..plan import Plan
from ..step import Step


@dataclass(frozen=True)
class PlainModel:
    """A model that is about to be wrapped, with the arguments of its wrapper."""

    module: nn.Module
    config: Any
    """The model's config, any object."""
    ddp_config: DistributedDataParallelConfig
    groups: DataParallelGroups
    engine: EngineKind


class Guard:
    """One guarantee of a wrapper. A wrapper makes one object of each class in `GUARDS`, and calls it at each moment.

    A method is overridden where there is something to check, and raises what the user has to know: what was asked,
    what was found, what to do. A guard keeps no wrapper alive: it gets what it looks at as arguments.
    """

    def at_wrap(self, model: PlainModel) -> None:
        """Checks a model before anything of it is changed, on each rank by itself."""

    def at_plan(self, plan: Plan, step: Step) -> None:
        """Checks a plan before anything is changed. All ranks are there. A guard may keep `step`."""

    def once_wrapped(self, module: nn.Module, engine: Engine) -> None:
        """Puts what watches the model on it, once the engine holds it."""

    def on_gradients(self, gradients: Iterable[tuple[str, Tensor]], are_reduced: bool) -> None:
        """Checks this rank's gradients, by name, when a part of them is about to be reduced, or just was.

        The engine calls it, on the thread that runs the backward or the step.
        """

    def before_reduction(self, engine: Engine) -> None:
        """Checks before `finish_grad_sync` completes the reduction, and before updated parameters are gathered."""

    def on_failure(self, engine: Engine) -> None:
        """Explains why a reduction raised an error of torch. Returns if there is nothing to explain."""

    def before_step(self, engine: Engine, optimizer: str, *, is_torchs: bool) -> None:
        """Checks before an optimizer reads gradients and writes parameters.

        Args:
            optimizer: its name, for messages.
            is_torchs: it reads ``param.grad`` and writes the parameters, and does not know wrappers.
        """
