"""Prepares the user's torch optimizer: this library's optimizer makes its updates, on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ...base.errors import OptimizerError
from ...optimizer import MegatronOptimizer
from ..bridge.trained import Trained, build_update, replace_parameters, share_groups, unlike_ours


class PreparedOptimizer(AcceleratedOptimizer):
    """The result of `Accelerator.prepare` for an optimizer of a prepared model.

    `optimizer` is the user's optimizer. Its ``step`` first runs this library's update, and then finds no gradient to
    apply. It shares ``param_groups`` and state with this library's optimizer, so that schedulers built on either
    optimizer take effect.

    Args:
        optimizer: the user's optimizer.
        trained: its model. `trained.updates` makes the updates; if it is None, the user's does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.trained = trained
        trained.optimizer = optimizer
        self._is_accelerate_prepared = True  # accelerate then keeps it as it is
        optimizer.register_step_pre_hook(self._before_step)

    @property
    def megatron(self) -> MegatronOptimizer | None:
        """The optimizer that updates. None if it is the user's own."""
        updates = self.trained.updates
        return updates if isinstance(updates, MegatronOptimizer) else None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights in the last micro-batch of a step. Does nothing in the others.

        A gradient that is not finite skips the update on all ranks (`step_was_skipped`).

        Raises:
            OptimizerError: a closure was given.
        """
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise OptimizerError(
                "step was given a closure, which would run between reduction and update; leave it out"
            )
        self.trained.finish_sums()
        if self.megatron is not None:
            # Accelerate's attribute, which `step_was_skipped` returns. Valid until the next step.
            self._is_overflow = not self.megatron.step()[0]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zeroes the gradients after the last micro-batch of a step. Does nothing in the others."""
        if self.gradient_state.sync_gradients:
            self.trained.wrapper.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, for `load_state_dict` on the same layout. `save_state` saves for any layout."""
        return (self.optimizer if self.megatron is None else self.megatron).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from this rank's own `state_dict`."""
        (self.optimizer if self.megatron is None else self.megatron).load_state_dict(state_dict)
        if self.megatron is not None:
            share_groups(self.optimizer, self.megatron)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, trained: Trained, replaced: Mapping[nn.Parameter, nn.Parameter]
) -> PreparedOptimizer:
    """Makes a torch optimizer, built over the plain or the wrapped model, update the wrapped model.

    For AdamW, SGD and Adam without weight decay, an optimizer of `get_megatron_optimizer` makes the updates, with
    their groups and settings. Over replicas, any other optimizer makes its own updates.

    Args:
        replaced: maps parameters of the plain model to those of the wrapped model.

    Raises:
        OptimizerError: the optimizer cannot update shards, has stepped already, or has parameters of another model.
    """
    replace_parameters(optimizer, replaced)
    if unlike_ours(optimizer) and trained.wrapper.plan.is_replicated:
        return PreparedOptimizer(optimizer, trained)
    if optimizer.state and not unlike_ours(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} has stepped before its model was prepared, and its state would be lost; "
            "prepare a new one, and load the state with load_state"
        )
    # bf16: with fp32 masters of weights in bf16, if there are any.
    trained.updates = build_update(optimizer, trained.wrapper, "ShardstackPlugin('no_shard')", bf16=True)
    return PreparedOptimizer(optimizer, trained)
