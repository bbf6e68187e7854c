"""A step whose update is queued, and its result, which the host reads later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ShardstackError
from ..optimizer import MegatronOptimizer, OptimizerParamScheduler
from ..optimizer.optimizer import StepOutcome


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step, equal on all ranks."""

    loss: float
    """Mean loss in nats per token: over all tokens with `calculate_per_token_loss`, else the mean over
    micro-batches."""

    updated: bool
    """False if gradients overflowed and the step was skipped."""

    grad_norm: float | None
    """Global norm of the gradient before clipping."""

    num_zeros: int | None
    """Zeros in the gradient; None if the optimizer does not count them."""

    stop: bool
    """Whether any rank was asked to stop."""

    lr: float
    """Largest learning rate of the update."""

    loss_scale: float
    """The factor that losses were multiplied by before backward."""


class RunningStep:
    """A step that is queued; the device may still compute it, and decides whether it is skipped.

    The host learns the result when it asks for it, or when the next step needs to know it: before its update, or
    before its first backward where the loss scale adapts. Then the schedule moves on.

    Args:
        totals: `[3]`, over all ranks: sum of losses, what to divide it by, and how many ranks were asked to stop.
    """

    def __init__(self, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, totals: torch.Tensor) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        # None until the host knows the outcome: the optimizer then calls `_conclude`, which sets it once.
        self._result: StepResult | None = None
        optimizer.start_step(totals, concluded=self._conclude)

    def _conclude(self, outcome: StepOutcome) -> None:
        if outcome.updated:
            self._scheduler.step(1)
        total_loss, total_weight, stops = outcome.report
        scaled = self._optimizer.grad_scaler is not None
        counts = self._optimizer.config.log_num_zeros_in_grad and (outcome.updated or not scaled)
        self._result = StepResult(
            loss=total_loss / max(total_weight, 1.0),
            updated=outcome.updated,
            grad_norm=outcome.grad_norm if outcome.updated or not scaled else None,
            num_zeros=outcome.num_zeros if counts else None,
            stop=stops > 0,
            lr=outcome.lr,
            loss_scale=outcome.loss_scale,
        )

    def result(self) -> StepResult:
        """Returns the result, after waiting for the device if it is not known yet.

        Raises:
            OutOfStepError: not all ranks took part in the step.
        """
        if self._result is None:
            self._optimizer.finish_step()
        if self._result is None:
            raise ShardstackError("the step's update was never queued: train_step raised; its error says why")
        return self._result
