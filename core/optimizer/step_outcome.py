"""The outcome of an optimizer's step, which the device decides and the host learns later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.host_read import HostRead
from ..errors import OptimizerError


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, equal on all ranks."""

    updated: bool
    """False if a gradient was not finite, so that nothing was updated."""

    grad_norm: float
    """Global norm of the gradient before clipping, without the loss scale; not finite if the step was skipped."""

    num_zeros: int
    """Zeros in the gradient; 0 where they are not counted."""

    report: tuple[float, ...]
    """The numbers that `MegatronOptimizer.start_step` was given to bring along."""

    lr: float
    """Largest learning rate of the update."""

    loss_scale: float
    """What losses were multiplied by."""


class PendingOutcome:
    """The outcome while it is copied to the host.

    Args:
        norm: 0-dim, in double.
        num_zeros: likewise.
        report: `[n]`, numbers of the caller, copied with it; None for none.
        written: for each of `names` whether it was written behind the masters' back; None if that is known already.
        stepped: main tensors whose step was counted in advance.
        lr, loss_scale: of the step.

    Attributes:
        stepped: as given; the optimizer empties it where it makes no update, so that no step is taken back.
    """

    def __init__(
        self,
        norm: Tensor,
        num_zeros: Tensor,
        report: Tensor | None,
        written: Tensor | None,
        names: Sequence[str],
        *,
        stepped: Sequence[Tensor],
        lr: float,
        loss_scale: float,
    ) -> None:
        parts = [torch.stack([norm, num_zeros]), *(part for part in (report, written) if part is not None)]
        self._read = HostRead(torch.cat([part.to(norm.device, torch.float64) for part in parts]))
        self._num_reported = 0 if report is None else len(report)
        self._names = names if written is not None else ()
        self._lr, self._loss_scale = lr, loss_scale
        self.stepped = stepped

    def wait(self) -> StepOutcome:
        """Returns the outcome once the device knows it.

        Raises:
            OutOfStepError: not all ranks took part in the step.
            OptimizerError: parameters in low precision were written between this step and the one before it.
        """
        norm, num_zeros, *others = self._read.wait()
        report, written = others[: self._num_reported], others[self._num_reported :]
        changed = [name for name, is_written in zip(self._names, written, strict=True) if is_written]
        if changed:
            raise OptimizerError(
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} was written after a step of "
                "the optimizer that was still running, and the next step has undone that: masters in fp32 are what "
                "it updates; call the optimizer's reload_model_params() after writing, or take the result of each "
                "step before"
            )
        return StepOutcome(
            updated=math.isfinite(norm),
            grad_norm=norm,
            num_zeros=int(num_zeros),
            report=tuple(report),
            lr=self._lr,
            loss_scale=self._loss_scale,
        )
