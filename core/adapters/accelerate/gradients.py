"""Reduces the gradients of a prepared model once a step, as a sum or a mean, depending on the loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from ...distributed import _BaseDataParallel
from ...errors import ConfigError
from ...optimizer import MegatronOptimizer
from ..gradient_norm import GradientNorm

_OF_WRAPPER = "_step_gradients"
"""The attribute of a wrapper that holds its `StepGradients`, which live as long as it."""


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
        vars(wrapper)[_OF_WRAPPER] = self
        self.wrapper = wrapper
        self.optimizer: MegatronOptimizer | None = None
        self.loss_is_global = False

    @staticmethod
    def of(wrapper: object) -> StepGradients | None:
        """Returns those of a wrapper that an accelerator has made, else None."""
        found: StepGradients | None = getattr(wrapper, "__dict__", {}).get(_OF_WRAPPER)
        return found

    def finish(self) -> None:
        """Makes gradients global, once a step: on every rank the result, or its shard of it."""
        if self.wrapper.gradient_state.is_reduced:
            return
        self.wrapper.finish_grad_sync()
        if not self.loss_is_global and (ranks := self.wrapper.process_group.size()) > 1:
            self.wrapper.scale_gradients(1.0 / ranks)

    @functools.cached_property
    def norm(self) -> GradientNorm:
        """The gradient as one vector, which clips."""
        return GradientNorm(self.wrapper)

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
