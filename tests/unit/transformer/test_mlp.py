"""The gated activation: autograd's bits, from one saved tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.transformer.mlp import activate
from core.transformer.transformer_config import ACTIVATIONS

FFN = 24


def _by_autograd(hidden: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
    return activation(gate.contiguous()) * up.contiguous()


def _saved(run: Callable[[], Tensor]) -> int:
    """Returns the elements that autograd keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "dtype"), list(product(["silu", "gelu", "gelu_tanh"], [torch.float32, torch.bfloat16]))
)
def test_a_gated_activation_has_autograds_bits(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    hidden, grad = torch.randn(5, 3, 2 * FFN, dtype=dtype), torch.randn(5, 3, FFN, dtype=dtype)
    results = []
    for function in (lambda x: activate(x, ACTIVATIONS[name], True), lambda x: _by_autograd(x, ACTIVATIONS[name])):
        x = hidden.clone().requires_grad_()
        output = function(x)
        results.append((output, *torch.autograd.grad(output, x, grad)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_gated_activation_saves_its_input_alone():
    hidden = torch.randn(7, 2 * FFN, requires_grad=True)
    assert _saved(lambda: activate(hidden, F.silu, True)) == 7 * 2 * FFN
    assert _saved(lambda: _by_autograd(hidden, F.silu)) == 7 * 3 * FFN


def test_a_users_function_keeps_its_own_derivatives():
    hidden = torch.randn(4, 2 * FFN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: activate(x, torch.sin, True), hidden[:1, :4])
