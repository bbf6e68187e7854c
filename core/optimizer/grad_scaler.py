"""The outcome of a step, which the device decides and the host learns later, and the loss scale that follows from it.

A loss scale keeps fp16 gradients from underflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.errors import OptimizerError
from ..comm.lane import HostRead
from .optimizer_config import OptimizerConfig


class GradScaler:
    """A loss scale that never changes. The configuration has it, so that no state is saved."""

    def __init__(self, initial_scale: float) -> None:
        # The factor of losses, equal on all ranks, because ranks agree on an overflow before they update it. `update`
        # of a dynamic scale sets it once a step, and `load_state_dict` when a run resumes.
        self.scale = initial_scale

    def update(self, found_inf: bool) -> None:
        """Adapts the scale once a step.

        Args:
            found_inf: a gradient was not finite on some rank, so that the step was skipped.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain numbers."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""


class ConstantGradScaler(GradScaler):
    """Megatron-LM's name of a scale that never changes."""


class DynamicGradScaler(GradScaler):
    """A loss scale that grows while gradients stay finite and backs off when they overflow, by Megatron-LM's rules.

    `growth_interval` finite steps in a row multiply the scale by `growth_factor`. Overflows are counted since the
    scale last grew: from the `hysteresis`-th on, each multiplies the scale by `backoff_factor`, down to `min_scale`.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        super().__init__(initial_scale)
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        # Finite steps in a row. `update` counts them, and resets them at an overflow and when the scale grows.
        self._finite_steps = 0
        # Overflows until the scale backs off; at 0 and below each one does. `update` counts them down, and resets them
        # when the scale grows.
        self._overflows_left = hysteresis

    def update(self, found_inf: bool) -> None:
        """Grows, backs off, or waits."""
        if found_inf:
            self._finite_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._finite_steps += 1
        if self._finite_steps == self.growth_interval:
            self._finite_steps = 0
            self._overflows_left = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and both counters, under Megatron-LM's names."""
        return {"scale": self.scale, "growth_tracker": self._finite_steps, "hysteresis_tracker": self._overflows_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`. An empty one, from a run with a constant scale, changes nothing."""
        if state_dict:
            self.scale = float(state_dict["scale"])
            self._finite_steps = int(state_dict["growth_tracker"])
            self._overflows_left = int(state_dict["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig) -> GradScaler | None:
    """Returns the scaler that `config` asks for: constant, dynamic (fp16), or None, which is a loss scale of one."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if config.fp16:
        return DynamicGradScaler(
            config.initial_loss_scale,
            config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
    return None


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, equal on all ranks."""

    has_update: bool
    """False if a gradient was not finite, so that nothing was updated."""

    grad_norm: float
    """Global norm of the gradient before clipping, without the loss scale. Not finite if the step was skipped."""

    num_zeros: int
    """Number of zeros in the gradient, or 0 if they are not counted."""

    report: tuple[float, ...]
    """The numbers that the caller gave to `MegatronOptimizer.start_step` as `report`."""

    lr: float
    """Largest learning rate of the update."""

    loss_scale: float
    """Factor that losses were multiplied by."""


class PendingOutcome:
    """The outcome of a step while it is copied to the host.

    Args:
        norm: 0-dim, in double.
        num_zeros: 0-dim, in double.
        report: `[n]`, the caller's numbers, copied in the same read; None if there are none.
        written: `[len(names)]`, whether code other than the optimizer has written each parameter; None if the masters
            already have such values.
        names: names of parameters in low precision.
        params: main tensors whose step count was raised in advance.
        lr: largest learning rate of the step.
        loss_scale: the step's loss scale.
    """

    def __init__(
        self,
        norm: Tensor,
        num_zeros: Tensor,
        report: Tensor | None,
        written_flags: Tensor | None,
        names: Sequence[str],
        *,
        params: Sequence[Tensor],
        lr: float,
        loss_scale: float,
    ) -> None:
        parts = [torch.stack([norm, num_zeros]), *(part for part in (report, written_flags) if part is not None)]
        # Norm, number of zeros, report and written flags, in one copy that began here on the current stream.
        self._read = HostRead(torch.cat([part.to(norm.device, torch.float64) for part in parts]))
        self._num_reported = 0 if report is None else len(report)
        self._names = names if written_flags is not None else ()
        self._lr, self._loss_scale = lr, loss_scale
        # Main tensors whose step counts `take_back_step` lowers if the step is skipped. `MegatronOptimizer.start_step`
        # empties it if it makes no update.
        self.params = params

    def wait(self) -> StepOutcome:
        """Waits for the device and returns the outcome.

        Raises:
            OutOfStepError: not all ranks took part in the step.
            OptimizerError: parameters in low precision were written between this step and the one before it.
        """
        norm, num_zeros, *others = self._read.wait()
        report, flags = others[: self._num_reported], others[self._num_reported :]
        names = [name for name, is_written in zip(self._names, flags, strict=True) if is_written]
        if names:
            raise OptimizerError(
                f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} was written after a step of "
                "the optimizer that was still running, and the next step has overwritten the values from the fp32 "
                "masters; call the optimizer's reload_model_params() after writing, or its finish_step() before"
            )
        return StepOutcome(
            has_update=math.isfinite(norm),
            grad_norm=norm,
            num_zeros=int(num_zeros),
            report=tuple(report),
            lr=self._lr,
            loss_scale=self._loss_scale,
        )
