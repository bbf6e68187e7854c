"""Precision plugins of the Trainer that clip and step through the strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from ...errors import ConfigError

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true")


class StepsAndClips(Protocol):
    """The methods of the strategy that a plugin calls."""

    def clip_by_norm(self, max_norm: float) -> None:
        """Clips the gradient of the model by its global norm."""

    def clip_by_value(self, limit: float) -> None:
        """Clamps every element of the gradient."""

    def make_step(self, optimizer: Optimizer) -> None:
        """Updates the parameters from the gradient, and zeroes it."""


class _StepsThroughStrategy(Precision):
    """Clips and steps through the strategy; mixed in before one of Lightning's plugins."""

    strategy: StepsAndClips
    """Set by `of_strategy`, once, before Lightning gets the plugin."""

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward, clips, and makes the step; none where ``training_step`` returned None."""
        result = self._wrap_closure(model, optimizer, closure)
        if result is not None:
            self.strategy.make_step(optimizer)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips the gradient of the model by its global norm."""
        self.strategy.clip_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the gradient."""
        self.strategy.clip_by_value(float(clip_val))


class FullPrecision(_StepsThroughStrategy, Precision):
    """``32-true``."""


class BFloat16Autocast(_StepsThroughStrategy, MixedPrecision):
    """``bf16-mixed``: fp32 parameters, and `torch.autocast` around forward."""


class BFloat16(_StepsThroughStrategy, HalfPrecision):
    """``bf16-true``: bf16 parameters."""


def of_strategy(plugin: Precision | None, strategy: StepsAndClips) -> Precision:
    """Returns the counterpart of one of Lightning's plugins.

    Raises:
        ConfigError: a precision without a counterpart.
    """
    made: _StepsThroughStrategy
    if plugin is None or type(plugin) is Precision:
        made = FullPrecision()
    elif type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        made = BFloat16Autocast("bf16-mixed", plugin.device)
    elif type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        made = BFloat16("bf16-true")
    else:
        raise unsupported(plugin)
    made.strategy = strategy
    return made


def unsupported(plugin: object) -> ConfigError:
    """Returns the error for a plugin of another precision, of the Trainer or of Fabric."""
    kind = type(plugin).__name__
    found = getattr(plugin, "precision", kind)
    return ConfigError(f"precision is {found!r} ({kind}); this strategy takes {', '.join(SUPPORTED)}")
