"""The norm of a wrapped model's gradient, and clipping by it, for trainers that clip outside of the optimizer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..distributed import _BaseDataParallel
from ..distributed.flat_data_parallel import shards_buffers
from ..errors import OptimizerError
from ..optimizer.clip_grads import GradientStatistics, clip_coefficient, multiply_gradients
from ..optimizer.distrib_optimizer import collect_main_ranges
from ..optimizer.main_params import MainParam
from ..optimizer.param_groups import collect_main_params


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
