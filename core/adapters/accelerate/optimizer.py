"""The user's torch optimizer, continued by this library's on what each rank updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ...errors import OptimizerError
from ...optimizer import MegatronOptimizer, get_megatron_optimizer
from ..torch_optimizers import same_update, unlike_ours
from .gradients import StepGradients


class PreparedOptimizer(AcceleratedOptimizer):
    """What `Accelerator.prepare` returns for an optimizer of a prepared model.

    `optimizer` is the user's: its ``step`` first runs this library's update, and then finds no gradient left. Its
    ``param_groups`` and state are those of the update, so that schedulers that were built on it, or on this, act.

    Args:
        optimizer: the user's.
        gradients: those of its model. Their `optimizer` updates, where there is one, else the user's does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: StepGradients) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.gradients = gradients
        self._is_accelerate_prepared = True  # accelerate then keeps it as it is
        self._share()
        optimizer.register_step_pre_hook(self._before_step)

    @property
    def megatron(self) -> MegatronOptimizer | None:
        """The optimizer that updates; None if it is the user's own."""
        return self.gradients.optimizer

    def _share(self) -> None:
        if self.megatron is not None:
            self.optimizer.param_groups = self.megatron.param_groups
            self.optimizer.state = self.megatron.optimizer.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the weights, in the last micro-batch of a step; in the others it does nothing.

        A gradient that is not finite skips the update on all ranks (`step_was_skipped`).

        Raises:
            OptimizerError: a closure.
        """
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
            raise OptimizerError(
                "step was given a closure, which would run between reduction and update; leave it out"
            )
        self.gradients.finish()
        if self.megatron is not None:
            self._is_overflow = not self.megatron.step()[0]  # accelerate's, which `step_was_skipped` returns

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, after the last micro-batch of a step; in the others it does nothing."""
        if self.gradient_state.sync_gradients:
            self.gradients.wrapper.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, which `load_state_dict` takes; checkpoints of any layout are `save_state`'s."""
        return (self.optimizer if self.megatron is None else self.megatron).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from this rank's own `state_dict`."""
        (self.optimizer if self.megatron is None else self.megatron).load_state_dict(state_dict)
        self._share()


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, gradients: StepGradients, replaced: Mapping[nn.Parameter, nn.Parameter]
) -> PreparedOptimizer:
    """Makes an optimizer of torch, built over the plain or the wrapped model, step the wrapped one.

    AdamW, SGD and Adam without weight decay are continued by `get_megatron_optimizer`'s, with the groups and settings
    that they have. Over replicas any other is kept.

    Args:
        replaced: the wrapped model's parameter for each of the plain one.

    Raises:
        OptimizerError: an optimizer that cannot update shards, one that has stepped, or parameters of another model.
    """
    groups = [
        {**group, "params": [replaced.get(param, param) for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    # fp32 masters of bf16 weights, if there are any, as the update has.
    config = same_update(optimizer, bf16=True)
    plan = gradients.wrapper.plan
    if config is None and not plan.is_replicated:
        raise OptimizerError(
            f"{unlike_ours(optimizer)} cannot update the shards of {plan.strategy}; use AdamW, SGD or Adam without "
            "weight decay, with torch's defaults otherwise, or ShardstackPlugin('no_shard')"
        )
    if config is None:
        for group, taken in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = taken["params"]
        return PreparedOptimizer(optimizer, gradients)
    if optimizer.state:
        raise OptimizerError(
            f"{type(optimizer).__name__} has stepped before its model was prepared, and its state would be lost; "
            "prepare a new one, and load the state with load_state"
        )
    built = get_megatron_optimizer(config, [gradients.wrapper])
    _set_groups(built, groups)
    gradients.optimizer = built
    return PreparedOptimizer(optimizer, gradients)


def _set_groups(built: MegatronOptimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Replaces the groups of the update by the user's, whose parameters are the model's."""
    mains = built.main_tensors()
    counts = Counter(param for group in groups for param in group["params"])
    if counts.keys() != mains.keys() or len(counts) != counts.total():
        missing, unknown = len(mains.keys() - counts), len(counts.keys() - mains)
        raise OptimizerError(
            f"the optimizer has {len(counts)} parameters in its groups; of the model's trainable ones {missing} are "
            f"missing, {unknown} are not among them, and {counts.total() - len(counts)} are given twice; put every "
            "trainable parameter into one group, and freeze the others (requires_grad_(False)) before prepare"
        )
    built.param_groups.clear()
    for group in groups:
        params = [mains[param] for param in group["params"]]
        built.optimizer.add_param_group(group | {"params": params, "lr": float(group["lr"])})
