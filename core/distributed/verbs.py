"""What every engine does with the parameters and gradients of a model, in eight verbs.

Everything above, the order of a step, guards, checkpoints, the optimizer and reports, calls these and is written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from ..base.parameters import kept_range, local_part
from .distributed_data_parallel_config import Engine
from .groups import managed_parameters
from .parameter_owner import local_gradient
from .plan import Plan


class EngineVerbs(nn.Module, ABC):
    """The verbs of an engine, over all units of a model.

    ============  =====================================================================================
    gather        `whole_parameters`. In forward and backward engines gather units by themselves, ahead
    free          `settle_parameters`, and `note_step` after an update
    add           backward does it. `_set_gradient_sync` and `_open_reduced_gradients` say to what
    send          `start_grad_sync`, `_finish_grad_sync`. Units leave during backward where planned
    shard         `shard`, of a parameter
    grad_shard    `local_gradient`, of a parameter
    held          `held_tensors`
    recover       `recover` from a backward that raised, and `_zero_gradients`
    ============  =====================================================================================

    To gather, add and send a single unit is left to each engine: backward does it, in hooks of autograd under buffers
    and inside torch under FSDP2, where nothing else may call it.
    """

    engine: ClassVar[Engine]
    """What holds the parameters and gradients. Fixed by each class, and read when a model is planned."""
    checks_placement = False
    """Whether `check_may_step` raises if a parameter was moved or replaced after wrapping. Fixed by each class."""

    module: nn.Module
    plan: Plan
    _syncs_gradients: bool

    # ---- gather, free

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Does nothing in wrappers
        whose parameters are always whole, or are DTensors.
        """
        self.settle_parameters()
        yield

    @abstractmethod
    def settle_parameters(self) -> None:
        """Makes `module` hold the parameters that an optimizer updates. Call it outside of a forward."""

    @abstractmethod
    def note_step(self) -> None:
        """Drops gathered parameters. Called after an optimizer has written its parameters."""

    # ---- add, send

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._syncs_gradients = enabled

    @abstractmethod
    def _open_reduced_gradients(self) -> bool:
        """Lets a backward add to reduced gradients, as in a plain module.

        Gradients that the user has set to None since start from zero.

        Returns:
            False if that is impossible: new gradients are then dropped, and the next use of gradients raises.
        """

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reduction that `finish_grad_sync` completes. Does nothing in a wrapper that does not overlap."""

    @abstractmethod
    def _finish_grad_sync(self, force_all_reduce: bool) -> None:
        """Completes the reduction of all gradients (`finish_grad_sync`)."""

    # ---- shard, grad_shard

    def shard(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns this rank's part of a parameter: a run of its elements, flat, or the local part of a DTensor.

        It is the parameter itself where ranks keep whole ones.
        """
        own_range = kept_range(parameter)
        return local_part(parameter.detach()) if own_range is None else own_range[0]

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        return local_gradient(parameter)

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """Returns the tensors of this rank's reduced gradients."""
        return [g for _, p in managed_parameters(self.module) if (g := self.local_gradient(p)) is not None]

    # ---- held

    @abstractmethod
    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Returns this rank's tensors at this moment: ``parameters``, ``gathered parameters`` and ``gradients``.

        ``gradients not reduced yet`` are whole gradients that a reduction will free. Tensors may share memory, also
        between categories; it counts in the first.
        """

    def gradient_receivers(self) -> list[nn.Parameter]:
        """Returns the parameters whose ``grad`` a backward would add to at this moment."""
        return list(self.module.parameters())

    # ---- recover

    def recover(self) -> None:
        """Ends a backward that raised, if the engine detects one, and marks gradients broken."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Makes every gradient zero or None, after a step that was abandoned too."""
