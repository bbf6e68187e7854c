"""AdamW's compiled kernel makes the update that the passes of torch's fused kernel make, and compiles once.

Tolerances: u is half of fp32's epsilon. Each of the operations of an update rounds by u of its result, and compiled
code may keep a product unrounded before a sum. Moments have 3 roundings of terms that are at most as large as they
are; a step of at most the learning rate has 8, and the parameter two of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from core.base import fused
from core.optimizer import adamw_in_one_pass
from core.optimizer import update_rules as rules
from core.optimizer.update_rules import AdamW
from tests.unit._on_gpu import ON_GPU

U = 2.0**-24
RATES = (1e-2, 3e-3, 0.0, 1e-2)
SHAPES = ((100,), (33, 7), (4096,), (17,), (1,))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles on a CPU too."""
    monkeypatch.setattr(fused, "COMPILED_ON", ["cuda", "cpu"])
    monkeypatch.setattr(adamw_in_one_pass._adamw, "_compiled_function", None)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _updated(device: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[list[Tensor]]:
    """Returns parameters, weights and both moments after four updates, the third of which is skipped."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
    params.append(torch.randn(6, 5, generator=draw).to(device).t())  # is not contiguous
    rule = AdamW(params, lr=RATES[0], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    factor = torch.tensor(0.3, dtype=torch.float64, device=device)
    for step, lr in enumerate(RATES):
        rule.param_groups[0]["lr"] = lr
        grads = {p: torch.randn(p.shape, generator=draw).to(device, dtype) for p in params}
        if step == 2:
            grads[params[0]].fill_(torch.nan)
        weights = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in params[1:]}
        left = dict(weights)
        rule.update(grads, torch.tensor(step != 2, device=device), factor, left)
        assert not left
        if step == 2:
            rule.take_back(params)
    moments = [[rule.state[p][kind] for p in params] for kind in ("exp_avg", "exp_avg_sq")]
    return [params, list(weights.values()), *moments]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "aot_eager"),
        pytest.param("cpu", "inductor", marks=pytest.mark.long),
        pytest.param("cuda", "inductor", marks=ON_GPU),
    ],
)
def test_it_is_the_update_of_separate_passes(
    device: str, backend: str, dtype: torch.dtype, compiled: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    params, weights, *moments = _updated(device, dtype)
    graphs = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(fused, "COMPILED_ON", [])
    expected, expected_weights, *expected_moments = _updated(device, dtype)
    for found, wanted in zip(moments, expected_moments, strict=True):
        for moment, of_passes in zip(found, wanted, strict=True):
            assert ((moment - of_passes).abs() <= 4 * len(RATES) * U * of_passes.abs().max()).all()
    steps = sum(RATES) * (1 + 8 * U)
    for param, of_passes in zip(params, expected, strict=True):
        assert ((param - of_passes).abs() <= len(RATES) * 2 * U * (of_passes.abs() + 8 * steps)).all()
    for weight, param in zip(weights, params[1:], strict=True):
        assert torch.equal(weight, param.bfloat16())
    assert expected_weights[0].shape == weights[0].shape
    assert 2 <= graphs <= 6  # with and without weights, by 16, by 1, and of 1 alone; not one for each learning rate


def test_a_cut_tensor_has_the_same_bits(compiled: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    whole, grad = torch.randn(100), torch.randn(100)
    cut = [whole[:37].clone(), whole[37:].clone()]
    for params, grads in (([whole], [grad]), (cut, [grad[:37], grad[37:]])):
        rule = AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(3):
            rule.update(dict(zip(params, grads, strict=True)), torch.tensor(True), None, {})
    assert torch.equal(torch.cat(cut), whole)


def test_a_strided_tensor_has_the_bits_of_a_flat_one(compiled: None, monkeypatch: pytest.MonkeyPatch):
    """As replicas keep it, and as the buffers of shards do."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    flat, grad = torch.randn(7, 5), torch.randn(7, 5)
    strided = flat.t().contiguous().t()
    strided_grad = grad.t().contiguous().t()
    for param, gradient in ((flat, grad), (strided, strided_grad)):
        rule = AdamW([param], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        monkeypatch.setattr(rules, "in_whole_vectors", lambda *unused: pytest.fail("left to the passes"))
        for _ in range(3):
            rule.update({param: gradient}, torch.tensor(True), None, {})
    assert torch.equal(strided, flat) and torch.equal(strided_grad, grad) and not strided.is_contiguous()


def test_without_a_compiler_passes_are_made(compiled: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adamw_in_one_pass._adamw, "_cannot_compile", True)
    monkeypatch.setattr(adamw_in_one_pass._adamw, "function", lambda *unused: pytest.fail("was called"))
    found = _updated("cpu", torch.bfloat16)
    monkeypatch.setattr(fused, "COMPILED_ON", [])
    for of_kind, expected in zip(found, _updated("cpu", torch.bfloat16), strict=True):
        assert all(map(torch.equal, of_kind, expected))
