"""Loss scaling, which keeps fp16 gradients from underflow."""

from __future__ import annotations

from typing import Any

from .optimizer_config import OptimizerConfig


class GradScaler:
    """A loss scale that never changes. The configuration has it, so that no state is saved."""

    def __init__(self, initial_scale: float) -> None:
        # The factor of losses, equal on all ranks, because ranks agree on an overflow before they update it. `update`
        # of a dynamic scale sets it once a step, and `load_state_dict` when a run resumes.
        self.scale = initial_scale

    def update(self, found_inf: bool) -> None:
        """Adapts the scale once a step.

        Args:
            found_inf: a gradient was not finite on some rank, so that the step was skipped.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain numbers."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""


class ConstantGradScaler(GradScaler):
    """Megatron-LM's name of a scale that never changes."""


class DynamicGradScaler(GradScaler):
    """A loss scale that grows while gradients stay finite and backs off when they overflow, by Megatron-LM's rules.

    `growth_interval` finite steps in a row multiply the scale by `growth_factor`. Overflows are counted since the
    scale last grew: from the `hysteresis`-th on, each multiplies the scale by `backoff_factor`, down to `min_scale`.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        super().__init__(initial_scale)
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        # Finite steps in a row. `update` counts them, and resets them at an overflow and when the scale grows.
        self._finite_steps = 0
        # Overflows until the scale backs off; at 0 and below each one does. `update` counts them down, and resets them
        # when the scale grows.
        self._overflows_left = hysteresis

    def update(self, found_inf: bool) -> None:
        """Grows, backs off, or waits."""
        if found_inf:
            self._finite_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._finite_steps += 1
        if self._finite_steps == self.growth_interval:
            self._finite_steps = 0
            self._overflows_left = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and both counters, under Megatron-LM's names."""
        return {"scale": self.scale, "growth_tracker": self._finite_steps, "hysteresis_tracker": self._overflows_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`. An empty one, from a run with a constant scale, changes nothing."""
        if state_dict:
            self.scale = float(state_dict["scale"])
            self._finite_steps = int(state_dict["growth_tracker"])
            self._overflows_left = int(state_dict["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig) -> GradScaler | None:
    """Returns the scaler that `config` asks for: constant, dynamic (fp16), or None, which is a loss scale of one."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if config.fp16:
        return DynamicGradScaler(
            config.initial_loss_scale,
            config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
    return None
