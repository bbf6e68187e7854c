"""Guards of gradients: when they may be used, that they are finite, and that an optimizer reads the right ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import OptimizerError, ShardstackError
from ...comm.lane import HostRead
from ..engine.engine import Engine
from ..engine.gradients import UNREADABLE, is_unreadable
from ..plan import Plan
from ..step import Call, Step
from .guard import Guard


class OrderOfCalls(Guard):
    """An optimizer steps once with the gradients of one step, when they are global: see `Step`."""

    def before_step(self, engine: Engine, optimizer: str, *, is_torchs: bool) -> None:
        engine.gradients.state.check(Call.STEP, optimizer)


class FiniteGradients(Guard):
    """Gradients are finite, where ``check_for_nan_in_grad`` asks for it.

    Flat buffers have them checked before they are reduced with those of other ranks, so that an error can name the
    rank at fault.
    """

    def at_plan(self, plan: Plan, step: Step) -> None:
        self._is_on, self._step = plan.settings.check_for_nan_in_grad, step

    def on_gradients(self, gradients: Iterable[tuple[str, Tensor]], are_reduced: bool) -> None:
        if not self._is_on:
            return
        named = [(name, gradient.detach()) for name, gradient in gradients if gradient.numel()]
        norms: Iterable[float] = ()
        if named:  # one wait for the device. In double only norms of fp64 can overflow: there check every element
            each = torch._foreach_norm([gradient for _, gradient in named], 2, dtype=torch.float64)
            norms = HostRead(torch.stack([norm.to(each[0].device) for norm in each])).wait()
        for (name, gradient), norm in zip(named, norms, strict=True):
            if not math.isfinite(norm) and not torch.isfinite(gradient).all():
                of = f"{name}, reduced over ranks that may each be at fault," if are_reduced else name
                raise ShardstackError(
                    f"rank {dist.get_rank()}, step {self._step.number}: the gradient of {of} is not finite; lower the "
                    "learning rate, look at the batch, or drop check_for_nan_in_grad to go on"
                )


class UnassignedGradients(Guard):
    """``param.grad`` was not assigned where an optimizer reads this rank's shard of the gradient in its place."""

    def before_step(self, engine: Engine, optimizer: str, *, is_torchs: bool) -> None:
        if name := engine.find_assigned_gradient():
            raise OptimizerError(
                f"parameter {name} has a .grad of its own, but the sharding strategy {engine.plan.strategy!r} keeps "
                "the gradient of a shard on each rank, which the optimizer reads instead; set .grad before "
                "finalize_model_grads, or use the sharding strategy 'no_shard'"
            )


class ReadableGradients(Guard):
    """An optimizer of torch can read ``param.grad`` of every parameter."""

    def before_step(self, engine: Engine, optimizer: str, *, is_torchs: bool) -> None:
        if is_torchs and any(is_unreadable(param.grad) for param in engine.plan.root.modules[0].parameters()):
            raise ShardstackError(UNREADABLE)
