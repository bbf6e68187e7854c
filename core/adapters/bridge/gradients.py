"""Gradients of a trainer's step: reduced once, as a sum or a mean; their norm as one vector, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...distributed import _BaseDataParallel
from ...distributed.flat_data_parallel import shards_buffers
from ...errors import ConfigError, OptimizerError
from ...optimizer import MegatronOptimizer
from ...optimizer.clip_grads import GradientStatistics, clip_coefficient, multiply_gradients
from ...optimizer.distrib_optimizer import collect_main_ranges
from ...optimizer.main_params import MainParam
from ...optimizer.param_groups import collect_main_params

_NORM, _STEP = "_gradient_norm", "_step_gradients"
"""Attributes of a wrapper, with its `GradientNorm` and its `StepGradients`: set once by these, as long-lived as it."""


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

    @staticmethod
    def of(wrapper: _BaseDataParallel) -> GradientNorm:
        """Returns that of a wrapper, made at its first use."""
        norm: GradientNorm = vars(wrapper).get(_NORM) or GradientNorm(wrapper)
        vars(wrapper)[_NORM] = norm
        return norm

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradient down to a norm of at most `max_norm`, in place, and returns the norm before, in fp32.

        A norm that is not finite leaves the gradient as it is. Collective.

        Raises:
            OptimizerError: gradients are not reduced.
        """
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


class StepGradients:
    """Gradients of one wrapped model, from the last backward of a step to its update.

    Attributes:
        wrapper: the model's wrapper, which sums gradients over ranks.
        optimizer: updates the wrapper's parameters. `prepare_optimizer` sets it, once. None before, and if the user's
            own optimizer updates replicas.
        loss_is_global: whether losses of the step are divided by the tokens of all ranks already, so that the sum of
            gradients is the result. Else each rank's loss is a mean, and the result is the mean of gradients. The
            trainer sets it before a step's gradients are finished.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        vars(wrapper)[_STEP] = self
        self.wrapper = wrapper
        self.optimizer: MegatronOptimizer | None = None
        self.loss_is_global = False

    @staticmethod
    def of(wrapper: object) -> StepGradients | None:
        """Returns those of a wrapper that an accelerator has made, else None."""
        found: StepGradients | None = getattr(wrapper, "__dict__", {}).get(_STEP)
        return found

    def finish(self) -> None:
        """Makes gradients global, once a step: on every rank the result, or its shard of it."""
        if self.wrapper.gradient_state.is_reduced:
            return
        self.wrapper.finish_grad_sync()
        if not self.loss_is_global and (ranks := self.wrapper.process_group.size()) > 1:
            self.wrapper.scale_gradients(1.0 / ranks)

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
