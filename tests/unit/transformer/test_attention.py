"""Self-attention: which projections and norms there are, and the layout by query group."""

import pytest
import torch

from core.transformer import TransformerConfig
from core.transformer.attention import SelfAttention

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("changes", "qkv_bias", "proj_bias"),
    [
        ({}, True, True),
        ({"add_bias_linear": False}, False, False),
        ({"add_bias_linear": False, "add_qkv_bias": True}, True, False),
    ],
)
def test_config_decides_which_biases_exist(changes, qkv_bias, proj_bias):
    attention = SelfAttention(TransformerConfig(**(SIZES | changes)))
    assert (attention.linear_qkv.bias is not None, attention.linear_proj.bias is not None) == (qkv_bias, proj_bias)


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_query_group_rows_reach_only_their_heads(qk_layernorm):
    attention = SelfAttention(TransformerConfig(qk_layernorm=qk_layernorm, **SIZES))
    contexts = []
    attention.linear_proj.register_forward_pre_hook(lambda _, inputs: contexts.append(inputs[0].detach().clone()))
    x = torch.randn(5, 2, 16)
    attention(x)
    with torch.no_grad():
        attention.linear_qkv.weight[16:] += 1.0  # the second group: two queries, a key, a value of 4 channels
    attention(x)
    before, after = contexts
    assert torch.equal(before[..., :8], after[..., :8]) and not torch.equal(before[..., 8:], after[..., 8:])
