"""The outcome of a step: the device decides it, and the host learns it later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import OptimizerError
from ..comm.lane import HostRead


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
