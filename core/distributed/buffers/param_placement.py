"""Detects parameters that were moved, replaced, added or removed after the model was wrapped."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import torch
from torch import nn

from ...errors import WrapError
from ..model.rewrapping import reject_changed


class _Checks(Enum):
    """Where parameters are checked in each step: once, by the optimizer where it does so, as it comes last."""

    WHEN_REDUCED = auto()
    """No optimizer has checked yet; gradients are checked when they are finished, and parameters when they are
    gathered."""
    BY_OPTIMIZER = auto()
    """An optimizer checks before it steps, and has not done so in this step."""
    DONE = auto()
    """It has: what it updates now is in place."""


class ParamPlacement:
    """Remembers the memory of each parameter at wrapping, and compares it later.

    Args:
        params: names and parameters.
    """

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        # Name of each, and its address and dtype. `note_moved` replaces those of parameters that an engine has moved.
        self._names: dict[nn.Parameter, str] = {}
        self._places: dict[nn.Parameter, tuple[int, torch.dtype]] = {}
        self.note_moved(params)
        # `check_step` sets DONE. `begin_step`, which `check_gather` and zeroing gradients call, turns DONE into
        # BY_OPTIMIZER. Main thread only.
        self._checks = _Checks.WHEN_REDUCED

    def note_moved(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Remembers where the engine has moved parameters to."""
        for name, param in params:
            self._names[param], self._places[param] = name, (param.data_ptr(), param.dtype)

    def check_reduced(self, module: nn.Module) -> None:
        """Checks when gradients are finished, unless an optimizer will."""
        if self._checks is _Checks.WHEN_REDUCED:
            self.check(module)

    def check_step(self, module: nn.Module) -> None:
        """Checks before an optimizer steps."""
        self.check(module)
        self._checks = _Checks.DONE

    def check_gather(self, module: nn.Module) -> None:
        """Checks before updated parameters are gathered, unless the optimizer that updated them has."""
        if self._checks is not _Checks.DONE:
            self.check(module)
        self.begin_step()

    def begin_step(self) -> None:
        """Requires a new check for the next step."""
        if self._checks is _Checks.DONE:
            self._checks = _Checks.BY_OPTIMIZER

    def check(self, module: nn.Module) -> None:
        """Compares the module's parameters with those at wrapping.

        Raises:
            WrapError: a parameter was moved, replaced, added, removed or made trainable since.
        """
        reject_changed(module, self._names)
        for param in module.parameters():
            if param in self._places and self._places[param] != (param.data_ptr(), param.dtype):
                raise WrapError(
                    f"the storage of parameter {self._names[param]} was replaced after the model was wrapped (a move "
                    "to another device or dtype, or a load with assign=True); wrap it afterwards, or load in place"
                )
