"""The matrices of Muon's parameters, and the Newton-Schulz iteration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from core.base.module_protocol import FusedRows
from core.optimizer import get_megatron_optimizer, muon_recipe, optimizer_config
from core.optimizer.muon import matrices
from core.transformer.lora import add_lora
from tests.unit.optimizer.muon._muon import (
    GATED,
    GATED_QKV,
    QKV,
    Fused,
    config_of,
    give_gradients,
    gpt,
    optimizers_by_name,
)


@pytest.mark.parametrize("kind", get_args(optimizer_config.CoefficientType))
def test_coefficients_bring_singular_values_near_one(kind: Any):
    steps = {"polar_express": 8, "aol": 8, "deepseekv4": 10}.get(kind, 5)
    recipe = muon_recipe.recipe_of(config_of(muon_coefficient_type=kind, muon_num_ns_steps=steps))
    matrix = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(matrices.orthogonalize(matrix, recipe).float())
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize(
    ("kind", "order"),
    [("quintic", [0, 1, 2, 3, 4, 0, 1]), ("cans", [0, 1, 2, 3, 4, 4, 4]), ("polar_express", [*range(8), 7, 7])],
)
def test_further_steps_begin_again_or_repeat_the_last(kind: Any, order: list[int]):
    recipe = replace(
        muon_recipe.PRESETS["torch"], coefficient_type=kind, num_ns_steps=len(order), fp32_matmul_prec="highest"
    )
    row = torch.tensor([[0.6, 0.8]], dtype=torch.float64)  # its norm is 1, and each step a polynomial of it
    value = 1.0
    for a, b, c in (matrices.COEFFICIENTS[kind][index] for index in order):
        value = a * value + b * value**3 + c * value**5
    # The least norm of this preset changes nothing. A step amplifies rounding by its slope, 26 at most here.
    assert torch.allclose(matrices.orthogonalize(row, recipe), value * row, rtol=1e-9)


@pytest.mark.parametrize(("kind", "steps"), [("simple", 5), ("quintic", 5), ("cans", 5), ("polar_express", 8)])
def test_noise_of_a_gradient_grows_by_the_slope_at_zero(kind: Any, steps: int):
    """The bound of docs/muon.md, which noise in a direction that the gradient almost lacks reaches."""
    preset = muon_recipe.PRESETS["torch"]
    recipe = replace(preset, coefficient_type=kind, num_ns_steps=steps, fp32_matmul_prec="highest")
    slope = math.prod(a for a, _, _ in (matrices.COEFFICIENTS[kind] * steps)[:steps])
    left, _, right = torch.linalg.svd(
        torch.randn(16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64), full_matrices=False
    )
    values = torch.ones(16, dtype=torch.float64)
    values[-1] = 1e-6
    gradient = left @ values.diag() @ right
    noise = 1e-9 * gradient.norm()

    def growth(direction: Tensor) -> float:
        noisy = gradient + noise * direction / direction.norm()
        change = matrices.orthogonalize(noisy, recipe) - matrices.orthogonalize(gradient, recipe)
        return change.norm().item() / 1e-9

    assert growth(left[:, -1:] @ right[-1:]) > 0.95 * slope
    for seed in range(5):
        random = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert growth(random) < 1.01 * slope


@pytest.mark.parametrize(
    ("fused", "settings", "rows"),
    [
        (QKV, {}, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (QKV, {"muon_split_qkv_per_head": True}, [[i, i + 1] for i in range(0, 16, 2)]),
        (QKV, {"muon_split_qkv": False}, [list(range(16))]),
        (GATED_QKV, {}, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (GATED, {}, [list(range(0, 16, 2)), list(range(1, 16, 2))]),
        (GATED, {"muon_preset": "megatron"}, [list(range(16))]),
        (GATED, {"muon_split_gate_up": False}, [list(range(16))]),
    ],
)
def test_fused_rows_are_updated_as_matrices_of_their_own(fused: FusedRows, settings: Any, rows: list[list[int]]):
    model = Fused(fused)
    optimizer = get_megatron_optimizer(config_of(weight_decay=0.0, **settings), [model])
    before = model.weight.detach().clone()
    give_gradients([model.weight], 0)
    optimizer.step()
    for part in rows:  # each alone, as a parameter that has no fused rows
        alone = Fused(None, len(part))
        with torch.no_grad():
            alone.weight.copy_(before[part])
        alone.weight.grad = model.weight.grad[part].clone()  # type: ignore[index]
        get_megatron_optimizer(config_of(weight_decay=0.0, **settings), [alone]).step()
        assert torch.allclose(alone.weight, model.weight[part], rtol=0, atol=1e-6)
    assert not torch.allclose(before, model.weight, atol=1e-3)


def test_experts_are_a_batch_of_matrices():
    model = Fused(None)
    model.weight = nn.Parameter(torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(5)))
    before = model.weight.detach().clone()
    optimizer = get_megatron_optimizer(config_of(weight_decay=0.0), [model])
    give_gradients([model.weight], 0)
    optimizer.step()
    for index in range(3):
        alone = Fused(None)
        alone.weight = nn.Parameter(before[index].clone())
        alone.weight.grad = model.weight.grad[index].clone()  # type: ignore[index]
        get_megatron_optimizer(config_of(weight_decay=0.0), [alone]).step()
        assert torch.equal(alone.weight, model.weight[index])


def test_lora_factors_are_matrices_and_frozen_weights_stay():
    model = gpt()
    add_lora(model, 4, targets=("linear_qkv", "linear_proj"))
    optimizer = get_megatron_optimizer(config_of(), [model])
    names = optimizers_by_name(optimizer)
    assert names and set(names.values()) == {"muon"} and all(".adapter." in name for name in names)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params = [p for p in model.parameters() if p.requires_grad]
    give_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(before[name], p) != p.requires_grad for name, p in model.named_parameters())
    assert "q" in {matrix.split for matrix in optimizer.optimizer._matrices}  # type: ignore[attr-defined]
