"""Recipes of Muon: what decides the numbers of its update. Loaded for configs whose optimizer is Muon alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MuonRecipe:
    """How Muon computes an update from gradients: all that decides its numbers, but learning rate and weight decay."""

    momentum: float = 0.95
    """The momentum is a mean, ``m = momentum * m + (1 - momentum) * g``."""
    nesterov: bool = True
    coefficient_type: str = "simple"
    num_ns_steps: int = 5
    rounds_first: bool = True
    """An update that is multiplied in bf16 is rounded before it is divided by its norm. Else after."""
    eps: float = 1e-7
    adds_eps: bool = False
    """`eps` is added to the norm. Else it is the least norm."""
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    split_gate_up: bool = True
    """Fused rows of gate and up are two matrices."""
    fp32_matmul_prec: str = "medium"

    def scale(self, shape: Sequence[int]) -> float:
        """Returns the factor of an orthogonal update `[rows, columns]`."""
        rows, columns = shape
        if self.scale_mode == "spectral":
            return self.extra_scale_factor * math.sqrt(max(rows, columns))
        ratio = rows / columns
        return self.extra_scale_factor * math.sqrt(max(1, ratio) if self.scale_mode == "shape_scaling" else ratio)


_DEFAULT = "moonlight"

PRESETS: dict[str, MuonRecipe] = {
    "moonlight": MuonRecipe(eps=1e-7 * (1 - 0.95), adds_eps=True, extra_scale_factor=0.2),
    "keller-jordan": MuonRecipe(adds_eps=True, scale_mode="shape_scaling"),
    "megatron": MuonRecipe(
        nesterov=False, coefficient_type="quintic", rounds_first=False, eps=1e-15, split_gate_up=False
    ),
    "torch": MuonRecipe(scale_mode="shape_scaling"),
}
"""Published recipes. Liu et al., 2025 (Moonlight), Jordan's repository, Megatron-LM's configuration, torch.optim.

Moonlight's momentum is a sum, which is the mean times 1 / (1 - momentum). Division by the norm removes that factor, if
eps has it too.
"""

_OF_FORMULA = (*("nesterov", "scale_mode", "extra_scale_factor", "num_ns_steps", "coefficient_type", "split_gate_up"),)
_FREE = ("momentum", "fp32_matmul_prec")


def recipe_of(config: Any) -> MuonRecipe:
    """Returns the recipe of an `OptimizerConfig`: its preset, with the settings that are not None.

    Raises:
        ConfigError: a preset that is named, with a setting that changes its formula.
    """
    recipe = PRESETS[config.muon_preset or _DEFAULT]
    values = {name: getattr(config, f"muon_{name}") for name in (*_OF_FORMULA, *_FREE)}
    values = {name: value for name, value in values.items() if value is not None}
    for name in _OF_FORMULA:
        if config.muon_preset is not None and values.get(name, getattr(recipe, name)) != getattr(recipe, name):
            raise ConfigError(
                f"muon_{name} is {values[name]}, and muon_preset {config.muon_preset} has {getattr(recipe, name)}; "
                f"drop one (without muon_preset, settings replace those of {_DEFAULT})"
            )
    return replace(recipe, **values)
