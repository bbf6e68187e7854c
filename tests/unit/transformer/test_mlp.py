"""MLP: the choice of activations, and the layout of gate and up."""

import pytest
import torch
import torch.nn.functional as F

from core.transformer import TransformerConfig
from core.transformer.mlp import MLP


@pytest.mark.parametrize(
    ("name", "function"), [("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("silu", F.silu)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_output_equals_the_formula(name, function, gated):
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=12,
        gated_linear_unit=gated,
        activation_func=name,
        init_method_std=1.0,
    )
    mlp, x = MLP(config), torch.randn(3, 2, 8)
    rows = mlp.linear_fc1.weight
    assert rows.shape == ((24 if gated else 12), 8)
    if gated:  # rows alternate
        hidden = function(F.linear(x, rows[0::2])) * F.linear(x, rows[1::2])
    else:
        hidden = function(F.linear(x, rows))
    torch.testing.assert_close(mlp(x), F.linear(hidden, mlp.linear_fc2.weight))
