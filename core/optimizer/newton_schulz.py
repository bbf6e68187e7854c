"""Muon's recipes (Jordan et al., 2024): presets, coefficients, and the Newton-Schulz iteration.

A recipe is everything that decides an update's numbers, apart from the learning rate and the weight decay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.errors import ConfigError

Preset = Literal["moonlight", "keller-jordan", "megatron", "torch"]
ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
CoefficientType = Literal["simple", "quintic", "polar_express", "deepseekv4"]
Precision = Literal["medium", "high", "highest"]
Triple = tuple[float, float, float]

_CLASSIC: Triple = (3.4445, -4.7750, 2.0315)

COEFFICIENTS: dict[CoefficientType, tuple[Triple, ...]] = {
    "simple": (_CLASSIC,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": tuple(  # divided for bf16, which may round a singular value to above 1
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        )
    ),
    "deepseekv4": (_CLASSIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
"""Coefficients (a, b, c) of each step, by Megatron-LM's names."""

_REPEATS_LAST = ("polar_express", "deepseekv4")
"""Further steps take the last coefficients; those of other types start again."""


@dataclass(frozen=True, kw_only=True)
class MuonRecipe:
    """How an update is computed from gradients."""

    momentum: float = 0.95
    sums_momentum: bool = False
    """The momentum is a sum, ``m = momentum * m + g``; else a mean, ``m = momentum * m + (1 - momentum) * g``."""
    nesterov: bool = True
    coefficient_type: CoefficientType = "simple"
    num_ns_steps: int = 5
    rounds_first: bool = True
    """An update that is multiplied in bf16 is rounded before it is divided by its norm; else after."""
    eps: float = 1e-7
    adds_eps: bool = False
    """`eps` is added to the norm; else it is the least norm."""
    scale_mode: ScaleMode = "spectral"
    extra_scale_factor: float = 1.0
    split_gate_up: bool = True
    """Fused rows of gate and up are two matrices."""
    fp32_matmul_prec: Precision = "medium"

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype that an update is rounded to in any case before its matrix is multiplied; None if it is not."""
        return torch.bfloat16 if self.fp32_matmul_prec == "medium" and self.rounds_first else None

    @property
    def momentum_kind(self) -> str:
        """ "sum" or "mean", as checkpoints have it."""
        return "sum" if self.sums_momentum else "mean"

    def scale(self, shape: Sequence[int]) -> float:
        """Returns the factor of an orthogonal update `[rows, columns]`."""
        rows, columns = shape
        if self.scale_mode == "spectral":
            return self.extra_scale_factor * math.sqrt(max(rows, columns))
        ratio = rows / columns
        return self.extra_scale_factor * math.sqrt(max(1, ratio) if self.scale_mode == "shape_scaling" else ratio)


_DEFAULT: Preset = "moonlight"

PRESETS: dict[Preset, MuonRecipe] = {
    "moonlight": MuonRecipe(sums_momentum=True, adds_eps=True, extra_scale_factor=0.2),
    "keller-jordan": MuonRecipe(adds_eps=True, scale_mode="shape_scaling"),
    "megatron": MuonRecipe(
        nesterov=False, coefficient_type="quintic", rounds_first=False, eps=1e-15, split_gate_up=False
    ),
    "torch": MuonRecipe(scale_mode="shape_scaling"),
}
"""Published recipes. Liu et al., 2025 (Moonlight); Jordan's repository; Megatron-LM's configuration; torch.optim."""

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


def coefficients(kind: CoefficientType, num_steps: int) -> Iterable[Triple]:
    """Returns the coefficients of each step."""
    triples = COEFFICIENTS[kind]
    more = itertools.repeat(triples[-1]) if kind in _REPEATS_LAST else itertools.cycle(triples)
    return itertools.islice(itertools.chain(triples, more), num_steps)


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
    with _multiplied_in(recipe.fp32_matmul_prec):
        for a, b, c in coefficients(recipe.coefficient_type, recipe.num_ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def cost(shape: Sequence[int]) -> int:
    """Returns the multiplications of one step on a matrix, up to a constant factor."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


@contextmanager
def _multiplied_in(precision: Precision) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
