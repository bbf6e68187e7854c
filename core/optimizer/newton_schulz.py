"""Muon's recipes (Jordan et al., 2024): presets, coefficients, and the Newton-Schulz iteration.

A recipe is everything that decides an update's numbers, apart from the learning rate and the weight decay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.errors import ConfigError

Preset = Literal["moonlight", "keller-jordan", "megatron", "torch"]
ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
CoefficientType = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
Precision = Literal["medium", "high", "highest"]
Triple = tuple[float, float, float]

_CLASSIC: Triple = (3.4445, -4.7750, 2.0315)

# fmt: off
COEFFICIENTS: dict[CoefficientType, tuple[Triple, ...]] = {
    "simple": (_CLASSIC,),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": (*(_CLASSIC,) * 8, (2.0, -1.5, 0.5)),
}
# fmt: on
"""Coefficients (a, b, c) of the steps, by Megatron-LM's names.

Jordan et al., 2024; Cesista et al., 2025; Amsel et al., 2025 (Polar Express, with its safety factor of 1.01); Grishina
et al., 2025 (CANS); Boissin et al., 2025 (Turbo-Muon); DeepSeek-V4.
"""

_LAST_REPEATS = ("polar_express", "cans", "deepseekv4")
"""Types whose last coefficients are those of all further steps. Of the others the first come again."""


@dataclass(frozen=True, kw_only=True)
class MuonRecipe:
    """How an update is computed from gradients."""

    momentum: float = 0.95
    """The momentum is a mean, ``m = momentum * m + (1 - momentum) * g``."""
    nesterov: bool = True
    coefficient_type: CoefficientType = "simple"
    num_ns_steps: int = 5
    rounds_first: bool = True
    """An update that is multiplied in bf16 is rounded before it is divided by its norm. Else after."""
    eps: float = 1e-7
    adds_eps: bool = False
    """`eps` is added to the norm. Else it is the least norm."""
    scale_mode: ScaleMode = "spectral"
    extra_scale_factor: float = 1.0
    split_gate_up: bool = True
    """Fused rows of gate and up are two matrices."""
    fp32_matmul_prec: Precision = "medium"

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype that an update is rounded to in any case before its matrix is multiplied. None if it is not."""
        return torch.bfloat16 if self.fp32_matmul_prec == "medium" and self.rounds_first else None

    def scale(self, shape: Sequence[int]) -> float:
        """Returns the factor of an orthogonal update `[rows, columns]`."""
        rows, columns = shape
        if self.scale_mode == "spectral":
            return self.extra_scale_factor * math.sqrt(max(rows, columns))
        ratio = rows / columns
        return self.extra_scale_factor * math.sqrt(max(1, ratio) if self.scale_mode == "shape_scaling" else ratio)


_DEFAULT: Preset = "moonlight"

PRESETS: dict[Preset, MuonRecipe] = {
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
    """Returns the recipe of an `OptimizerConfig`: that of its preset, with the settings that are not None.

    Raises:
        ConfigError: a preset that is named, with a setting that changes its formula.
    """
    recipe = PRESETS[config.muon_preset or _DEFAULT]
    given = {name: value for name in (*_OF_FORMULA, *_FREE) if (value := getattr(config, f"muon_{name}")) is not None}
    for name in _OF_FORMULA:
        if config.muon_preset is not None and given.get(name, getattr(recipe, name)) != getattr(recipe, name):
            raise ConfigError(
                f"muon_{name} is {given[name]}, and muon_preset {config.muon_preset} has {getattr(recipe, name)}; "
                f"drop one (without muon_preset, settings replace those of {_DEFAULT})"
            )
    return replace(recipe, **given)


def orthogonalize(update: Tensor, recipe: MuonRecipe) -> Tensor:
    """Returns a matrix with the singular vectors of `update` and singular values near 1, in the dtype of products.

    The bits depend on nothing but the matrix: one call for each, with operations in the order of `torch.optim.Muon`.

    Args:
        update: `[rows, columns]`, contiguous.
    """
    is_rounded, is_tall = recipe.fp32_matmul_prec == "medium", update.shape[0] > update.shape[1]
    x = update.bfloat16() if is_rounded and recipe.rounds_first else update
    x = x.T if is_tall else x
    norm = x.norm()
    x = x / (norm + recipe.eps if recipe.adds_eps else norm.clamp(min=recipe.eps))
    x = x.bfloat16() if is_rounded else x
    triples = COEFFICIENTS[recipe.coefficient_type]
    rest = triples[-1:] if recipe.coefficient_type in _LAST_REPEATS else triples
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(recipe.fp32_matmul_prec)
    try:
        for a, b, c in itertools.islice(itertools.chain(triples, itertools.cycle(rest)), recipe.num_ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    finally:
        torch.set_float32_matmul_precision(before)
    return x.T if is_tall else x


def cost(shape: Sequence[int]) -> int:
    """Returns the multiplications of one step on a matrix, up to a constant factor."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
