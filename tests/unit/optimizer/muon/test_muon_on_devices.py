"""Muon on a CPU and on a GPU: products in each precision, whole steps, and skipped ones, against double precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.models.gpt import GPTModel
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.muon import matrices
from core.optimizer.muon.matrices import COEFFICIENTS, orthogonalize, orthogonalize_all
from core.optimizer.muon_recipe import PRESETS, MuonRecipe
from core.transformer import TransformerConfig
from tests.unit._on_gpu import ON_GPU, one_rank_on_a_gpu
from tests.unit._rounding import assert_same

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
SHAPES = [(48, 200), (264, 96), (160, 160), (1, 72)]
TOLERANCES = {"highest": 1e-5, "high": 0.01, "medium": 0.06}
"""Relative to the norm of a result, by precision: of 24, 11 and 8 bits. The steps amplify the rounding of directions
that an update almost lacks, by up to 485."""


def _in_double(update: Tensor, recipe: MuonRecipe) -> Tensor:
    """Returns a matrix with the same singular vectors, each of whose singular values the steps have mapped alone."""
    left, values, right = torch.linalg.svd(update.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in islice(cycle(COEFFICIENTS[recipe.coefficient_type]), recipe.num_ns_steps):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("preset", PRESETS)
def test_products_of_each_precision_are_near_double(device: str, precision: Any, preset: Any):
    recipe = replace(PRESETS[preset], fp32_matmul_prec=precision)
    generator, before = torch.Generator().manual_seed(1), torch.get_float32_matmul_precision()
    for shape in SHAPES:
        update = torch.randn(shape, generator=generator)
        found = orthogonalize(update.to(device), recipe)
        assert found.dtype == (torch.bfloat16 if precision == "medium" else torch.float32)
        assert found.device.type == device and found.shape == shape
        assert torch.equal(found, orthogonalize(update.to(device), recipe))
        expected = _in_double(update, recipe)
        off = (found.cpu().double() - expected).norm() / expected.norm()
        assert off <= TOLERANCES[precision], shape
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_a_matrix_has_the_same_bits_in_any_chunk(device: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """Of which ranks own which matrices nothing depends on. Chunks have 4 of these matrices, and the last one 3."""
    monkeypatch.setattr(matrices, "_CHUNKED_ON", [device])
    monkeypatch.setattr(matrices, "_CHUNK_ELEMENTS", 4 * 12 * 20)
    generator, recipe = torch.Generator().manual_seed(3), PRESETS["moonlight"]
    updates = {index: torch.randn(shape, generator=generator).to(device) for index in range(7)}
    updates[9] = torch.randn(7, 70, generator=generator).to(device)  # of another shape, and one chunk
    found = orthogonalize_all(updates, recipe)
    assert found.keys() == updates.keys()
    for index, update in updates.items():
        assert torch.equal(found[index], orthogonalize_all({index: update}, recipe)[index])
        expected = _in_double(update.cpu(), recipe)
        assert (found[index].cpu().double() - expected).norm() <= TOLERANCES["medium"] * expected.norm()
    backwards = dict(reversed(updates.items()))
    assert all(map(torch.equal, orthogonalize_all(backwards, recipe).values(), reversed(found.values())))


def _joined(device: str) -> AbstractContextManager[None]:
    return one_rank_on_a_gpu() if device == "cuda" else nullcontext()


def _model() -> GPTModel:
    """Makes a GPT whose matrices are fused, experts', and of both forms; AdamW updates some of its parameters."""
    torch.manual_seed(5)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    form = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False, "add_qkv_bias": True}
    experts = {"num_moe_experts": 3, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1], "ffn_hidden_size": 48}
    return GPTModel(TransformerConfig(**sizes, **form, **experts), vocab_size=40, max_sequence_length=8)


def _optimizer(model: nn.Module, **settings: Any) -> MegatronOptimizer:
    config = OptimizerConfig(optimizer="muon", lr=0.02, weight_decay=0.1, clip_grad=1.0, **settings)
    return get_megatron_optimizer(config, [model])


def _step(model: nn.Module, optimizer: MegatronOptimizer, step: int, factor: float = 1.0) -> bool:
    """Takes a step with gradients that a seed decides, and returns whether it was not skipped."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
    updated: bool = optimizer.step()[0]
    return updated


def _updates(model: nn.Module, precision: str) -> dict[str, Tensor]:
    """Returns how far three steps move each parameter."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = _optimizer(model, muon_fp32_matmul_prec=precision)
    assert all(_step(model, optimizer, step) for step in range(3))
    return {name: (p.detach() - before[name]).cpu().double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_steps_are_near_those_in_double(device: str, precision: Any):
    expected = _updates(_model().double(), "highest")
    model = _model().to(device)
    with _joined(device):
        found = _updates(model, precision)
    for name, update in expected.items():
        off = (found[name] - update).norm() / update.norm()
        assert off <= TOLERANCES[precision], name


def _copied(model: nn.Module, optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *optimizer.state_tensors().items())}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("holder", ["shards", "owners"])
def test_an_infinite_gradient_changes_nothing(device: str, holder: Any):
    model = _model().to(device)
    with _joined(device):
        optimizer = _optimizer(model, muon_momentum_holder=holder, muon_fp32_matmul_prec="highest")
        assert _step(model, optimizer, 0)
        before = _copied(model, optimizer)
        assert not _step(model, optimizer, 1, factor=math.inf)
        assert_same(_copied(model, optimizer), before)
        assert _step(model, optimizer, 2)
        after = _copied(model, optimizer)
        assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())
