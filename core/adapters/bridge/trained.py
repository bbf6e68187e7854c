"""Runs a wrapped model in another library's loop: reduces its gradient once a step, measures, clips, and updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import ConfigError, OptimizerError
from ...base.module_protocol import unwrap_model
from ...dist_checkpointing import model_state_dict
from ...distributed import _BaseDataParallel
from ...distributed.engine.engine import owner_of
from ...distributed.step_marks import current_parameter
from ...optimizer import MegatronOptimizer, shard_optimizer
from ...optimizer.clip_grads import gradient_factor, multiply_gradients
from ...optimizer.distrib_optimizer import gradient_statistics
from ...optimizer.main_ranges import collect_main_params
from ...optimizer.torch_rule import NotElementwiseError

_TRAINED = "_trained"
"""Attribute of a wrapper: the last `Trained` that was made of the wrapper."""


def wrapper_of(module: nn.Module) -> _BaseDataParallel | None:
    """Returns the wrapper of `module`, a model or a part of one. Returns a wrapper itself. None without a wrapper."""
    if isinstance(module, _BaseDataParallel):
        return module
    owners = map(owner_of, module.parameters())
    return next((owner for owner in owners if isinstance(owner, _BaseDataParallel)), None)


def mix_in(target: Any, kind: type) -> None:
    """Makes an object use the methods of `kind`, a subclass of the object's base, before its own class's methods.

    Nothing puts the old class back. A second call changes nothing.
    """
    own = type(target)
    if issubclass(kind, own):
        target.__class__ = kind
    elif not isinstance(target, kind):
        target.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


class GradientNorm:
    """The whole gradient of a wrapped model as one vector: measures its norm, clips and clamps it.

    The norm is equal on every rank. Squares are summed in double over shards and ranks, and rounded once, so that the
    norm does not depend on the sharding.

    Args:
        wrapper: the wrapper, from `shardstack.distributed.wrap_model`.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        self._wrapper = wrapper
        self._params = collect_main_params([wrapper], has_master=False)
        self._statistics = gradient_statistics(
            self._params, wrapper.plan.groups.model, is_exact=wrapper.plan.settings.reproducible_across_ranks
        )

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradient down to a norm of at most `max_norm`, in place, and returns the norm before, in fp32.

        A norm that is not finite leaves the gradient as it is. Collective.

        Raises:
            ConfigError: another norm than L2.
            OptimizerError: gradients are not reduced.
        """
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"norm_type is {norm_type}; gradients over several ranks are clipped by their L2 norm, 2"
            )
        gradients = self._gradients()
        norm = self._statistics.measure(gradients)[0].float()
        if (factor := gradient_factor(norm.double(), max_norm, 1.0)) is not None:
            multiply_gradients([gradient for gradient in gradients if gradient is not None], factor)
        return norm

    @torch.no_grad()
    def clamp(self, limit: float) -> None:
        """Clamps each element of the gradient to ``[-limit, limit]``, in place.

        Raises:
            OptimizerError: gradients are not reduced.
        """
        if present := [gradient for gradient in self._gradients() if gradient is not None]:
            torch._foreach_clamp_min_(present, -limit)
            torch._foreach_clamp_max_(present, limit)

    def _gradients(self) -> list[Tensor | None]:
        if not self._wrapper.step.is_reduced:
            raise OptimizerError(
                f"gradients are {self._wrapper.step.phase.value} where they were to be measured or clipped; "
                "do it after the last backward of a step, which reduces them, and before the optimizer's step"
            )
        return [param.local_gradient() for param in self._params]


class Trained:
    """A wrapped model, and what updates it.

    Attributes:
        wrapper: the model's wrapper.
        optimizer: the user's optimizer. `take` sets it with `updates`. None before, and outside of training.
        updates: the optimizer over shards, which runs the user's. None before, and if that updates replicas itself.
        loss_is_global: whether losses of the step are divided by the tokens of all ranks already, so that the sum of
            gradients is the result. Else each rank's loss is a mean, and the result is the mean of gradients. A
            trainer whose wrapper sums gradients sets it before a step's gradients are finished.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        vars(wrapper)[_TRAINED] = self
        self.wrapper = wrapper
        self.optimizer: Optimizer | None = None
        self.updates: MegatronOptimizer | None = None
        self.loss_is_global = False

    @staticmethod
    def of(wrapper: object) -> Trained | None:
        """Returns the `Trained` that an adapter made of a wrapper, or None."""
        return cast("Trained | None", getattr(wrapper, "__dict__", {}).get(_TRAINED))

    @staticmethod
    def of_parameters(parameters: Iterable[nn.Parameter]) -> Trained | None:
        """Returns the `Trained` of the one wrapper that has all of these parameters, or had before it was wrapped."""
        owners = {owner_of(current_parameter("the optimizer", parameter)) for parameter in parameters}
        return Trained.of(owners.pop()) if len(owners) == 1 else None

    def take(self, optimizer: Optimizer) -> None:
        """Lets an optimizer of the user, built over the plain or the wrapped model, update the wrapped model.

        Raises:
            OptimizerError: as `shard_optimizer`. But replicas take one that is not elementwise.
        """
        for group in optimizer.param_groups:
            if group.get("fused") and all(param.device.type == "cpu" for param in group["params"]):
                group["fused"] = False  # a trainer's default, whose kernels show on a CPU how a tensor is cut
        try:
            self.updates = shard_optimizer(optimizer, self.wrapper)
        except NotElementwiseError:
            if not self.wrapper.plan.is_replicated:
                raise
        self.optimizer = optimizer

    @cached_property
    def norm(self) -> GradientNorm:
        """The gradient as one vector, which is measured and clipped."""
        return GradientNorm(self.wrapper)

    def finish_sums(self) -> None:
        """Makes summed gradients global, once a step. Each rank gets the whole result, or its own shard."""
        if self.wrapper.step.is_reduced:
            return
        self.wrapper.finish_grad_sync()
        if not self.loss_is_global and (ranks := self.wrapper.process_group.size()) > 1:
            self.wrapper.scale_gradients(1.0 / ranks)

    def step(self) -> float | None:
        """Updates the parameters, and zeroes gradients, which have to be gone before the next forward.

        Returns:
            The norm of the gradient, if the update measures it.

        Raises:
            ConfigError: before the optimizer is set up.
        """
        if self.optimizer is None:
            raise ConfigError("the optimizer is set up when training begins; step and clip after that")
        if self.updates is None:
            self.optimizer.step()
        norm = None if self.updates is None else self.updates.step()[1]
        self.wrapper.zero_grad_buffer()
        return norm

    def check_complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises unless these are all trainable parameters of the model.

        Raises:
            ConfigError: a part of them.
        """
        identities = {id(parameter) for parameter in parameters if parameter.requires_grad}
        params = [parameter for parameter in self.wrapper.module.parameters() if parameter.requires_grad]
        if missing := sum(id(parameter) not in identities for parameter in params):
            raise ConfigError(
                f"gradients are clipped by the norm of the whole model, and {missing} of its {len(params)} trainable "
                "parameters were not given; give model.parameters()"
            )

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns the model's state by name, as tensors of the whole model that share this rank's storage."""
        self.wrapper.engine.parameters.settle()
        return model_state_dict(unwrap_model(self.wrapper))

    def updated(self) -> None:
        """Notes that the model's tensors were loaded."""
        self.wrapper.engine.updated()
