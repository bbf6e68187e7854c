"""Optimizers for Lightning: for each optimizer of the user, the one that updates the wrapped parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...distributed import _BaseDataParallel
from ...distributed.flat_data_parallel import shards_buffers
from ...distributed.gradient_state import Phase
from ...distributed.parameter_owner import owner_of
from ...errors import OptimizerError
from ...optimizer import OptimizerConfig, get_megatron_optimizer
from ..bridge.optimizers import TorchOptimizer, Updates, build_update


class ZeroesThroughWrapper(Optimizer):
    """Mixed into the class of an optimizer: ``zero_grad()`` zeroes the wrapper's gradients, not those in ``grad``."""

    wrapper: _BaseDataParallel
    """The wrapper of its parameters. Set when the optimizer is built or set up; never cleared."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of the whole model, unless they are zero."""
        if (
            self.wrapper.gradient_state.phase is not Phase.ZEROED
        ):  # else one between forward and backward gathers again
            self.wrapper.zero_grad_buffer()


class ShardstackOptimizer(ZeroesThroughWrapper):
    """The optimizer of `get_megatron_optimizer` with torch's interface, for schedulers and trainers.

    Build it after the model is wrapped: in ``configure_optimizers``, or after ``fabric.setup_module``.

    Args:
        params: the model's parameters; all trainable ones of the model are updated.
        config: the update rule. Its ``clip_grad`` clips in the step, by the norm of the whole model.

    Raises:
        OptimizerError: the parameters' model is not wrapped.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        wrapper = owner_of(next(iter(params), None))
        if not isinstance(wrapper, _BaseDataParallel):
            raise OptimizerError(
                "ShardstackOptimizer was given parameters of a model that is not wrapped; build it in "
                "configure_optimizers, or after fabric.setup_module, from the parameters that the model has then"
            )
        self.wrapper = wrapper
        self.megatron = get_megatron_optimizer(config, [wrapper])
        super().__init__(self.megatron.param_groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs `closure` if given, which has to leave reduced gradients, and updates the parameters."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.megatron.step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, in torch's layout."""
        return self.megatron.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`."""
        self.megatron.load_state_dict(state_dict)


def updates_of(optimizer: Optimizer, wrapper: _BaseDataParallel) -> Updates:
    """Returns what updates the parameters of a wrapped model for an optimizer.

    Raises:
        OptimizerError: built before the model was wrapped, or one that cannot update it.
    """
    if isinstance(optimizer, ShardstackOptimizer):
        return optimizer.megatron
    own = set(wrapper.parameters())
    if any(param not in own for group in optimizer.param_groups for param in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters that the wrapped model has not: it was built before the "
            "model was wrapped, or for another one; build it in configure_optimizers, or give it to fabric.setup "
            "together with the model"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS computes gradients several times in a step, which this strategy does not; use AdamW or SGD"
        )
    if shards_buffers(wrapper):
        advice = "ShardstackOptimizer, or the sharding 'fsdp2' or 'no_shard'"
        return build_update(optimizer, wrapper, advice)
    return TorchOptimizer(optimizer, wrapper.module)
