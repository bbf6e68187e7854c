"""A wrapped model in another library's loop: its gradient reduced once a step, measured and clipped; its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dist_checkpointing import model_state_dict
from ...distributed import _BaseDataParallel
from ...distributed.data_parallel_base import unwrap_model
from ...distributed.flat_data_parallel import shards_buffers
from ...distributed.parameter_owner import owner_of
from ...errors import ConfigError, OptimizerError
from ...optimizer.clip_grads import GradientStatistics, clip_coefficient, multiply_gradients
from ...optimizer.distrib_optimizer import collect_main_ranges
from ...optimizer.main_params import MainParam
from ...optimizer.param_groups import collect_main_params
from .optimizers import Updates

_TRAINED = "_trained"
"""Attribute of a wrapper, with its `Trained`. The last one that was made of it sets it; never removed."""


def wrapper_of(module: nn.Module) -> _BaseDataParallel | None:
    """Returns the wrapper of a model or of a part of it, or `module` if it is one; None without one."""
    if isinstance(module, _BaseDataParallel):
        return module
    owners = map(owner_of, module.parameters())
    return next((owner for owner in owners if isinstance(owner, _BaseDataParallel)), None)


def mix_in(target: Any, kind: type) -> None:
    """Puts the methods of `kind`, a subclass of the target's base, before those of the target's own class.

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
        wrapper: the wrapper, from `core.distributed.wrap_model`.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        self._wrapper = wrapper
        if shards_buffers(wrapper):
            self._params = collect_main_ranges([wrapper], [wrapper], has_master=False)
        else:
            self._params = collect_main_params([wrapper], partial(MainParam, has_master=False))
        self._statistics = GradientStatistics(self._params, is_exact=wrapper.plan.is_reproducible)

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
        factor = clip_coefficient(norm.double(), max_norm)
        factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
        multiply_gradients([gradient for gradient in gradients if gradient is not None], factor)
        return norm

    @torch.no_grad()
    def clamp(self, limit: float) -> None:
        """Clamps each element of the gradient to ``[-limit, limit]``, in place.

        Raises:
            OptimizerError: gradients are not reduced.
        """
        present = [gradient for gradient in self._gradients() if gradient is not None]
        if present:
            torch._foreach_clamp_min_(present, -limit)
            torch._foreach_clamp_max_(present, limit)

    def _gradients(self) -> list[Tensor | None]:
        if not self._wrapper.gradient_state.is_reduced:
            raise OptimizerError(
                f"gradients are {self._wrapper.gradient_state.phase.value} where they were to be measured or clipped; "
                "do it after the last backward of a step, which reduces them, and before the optimizer's step"
            )
        return [param.local_gradient() for param in self._params]


class Trained:
    """A wrapped model, and what updates it.

    Attributes:
        wrapper: the model's wrapper.
        optimizer: the user's optimizer. A trainer sets it with `updates`. None before, and outside of training.
        updates: what updates the parameters in its place. None before, and if the user's own updates replicas.
        loss_is_global: whether losses of the step are divided by the tokens of all ranks already, so that the sum of
            gradients is the result. Else each rank's loss is a mean, and the result is the mean of gradients. A
            trainer whose wrapper sums gradients sets it before a step's gradients are finished.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        vars(wrapper)[_TRAINED] = self
        self.wrapper = wrapper
        self.optimizer: Optimizer | None = None
        self.updates: Updates | None = None
        self.loss_is_global = False

    @staticmethod
    def of(wrapper: object) -> Trained | None:
        """Returns that of a wrapper that a trainer's adapter has made, else None."""
        found: Trained | None = getattr(wrapper, "__dict__", {}).get(_TRAINED)
        return found

    @cached_property
    def norm(self) -> GradientNorm:
        """The gradient as one vector, which is measured and clipped."""
        return GradientNorm(self.wrapper)

    def finish_sums(self) -> None:
        """Makes summed gradients global, once a step: on every rank the result, or its shard of it."""
        if self.wrapper.gradient_state.is_reduced:
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
        if self.optimizer is None or self.updates is None:
            raise ConfigError("the optimizer is set up when training begins; step and clip after that")
        _, norm, _ = self.updates.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        self.wrapper.zero_grad_buffer()
        return norm

    def check_complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises unless these are all trainable parameters of the model.

        Raises:
            ConfigError: a part of them.
        """
        asked = {id(parameter) for parameter in parameters if parameter.requires_grad}
        trained = [parameter for parameter in self.wrapper.module.parameters() if parameter.requires_grad]
        missing = sum(id(parameter) not in asked for parameter in trained)
        if missing:
            raise ConfigError(
                f"gradients are clipped by the norm of the whole model, and {missing} of its {len(trained)} trainable "
                "parameters were not given; give model.parameters()"
            )

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns the model's state by name, as tensors of the whole model that share this rank's storage."""
        self.wrapper.settle_parameters()
        return model_state_dict(unwrap_model(self.wrapper))

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Returns the optimizer's, likewise."""
        return {} if self.updates is None else self.updates.state_tensors()
