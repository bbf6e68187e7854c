"""Layers with experts, and what they compute, written out token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from core.transformer import TransformerConfig
from core.transformer.moe import MoELayer
from core.transformer.moe.dispatch import Permutation


def config_of(**fields: Any) -> TransformerConfig:
    """Returns a config with experts."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "num_moe_experts": 4}
    form = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False, "init_method_std": 1.0}
    return TransformerConfig(**{**sizes, **form, **fields})


def layer_of(seed: int = 0, **fields: Any) -> MoELayer:
    """Returns a layer whose weights a seed decides."""
    torch.manual_seed(seed)
    return MoELayer(config_of(**fields))


def permutation_of(
    ends: Sequence[int], rows: int, has_dropped: bool = True, device: torch.device | str = "cpu"
) -> Permutation:
    """Returns rows in their own order, whose experts have them up to the given ends."""
    order, last = torch.arange(rows), torch.tensor(ends, dtype=torch.int32)
    row_experts = torch.bucketize(order, last, right=True).clamp(max=len(ends) - 1)
    order = order.to(device)
    return Permutation(order, order, last.to(device), row_experts.to(device), 1, has_dropped)


def expert_output(layer: MoELayer, expert: int, token: torch.Tensor) -> torch.Tensor:
    """Returns what one expert makes of a token `[h]`."""
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    hidden = fc1.weight[expert] @ token
    if fc1.bias is not None:
        hidden = hidden + fc1.bias[expert]
    hidden = F.silu(hidden[0::2]) * hidden[1::2]
    output = fc2.weight[expert] @ hidden
    return output if fc2.bias is None else output + fc2.bias[expert]


def written_out(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Returns the layer's output for `[s, b, h]`, by softmax over each token's best experts."""
    outputs = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token
        if layer.router.bias is not None:
            logits = logits + layer.router.bias
        values, experts = logits.topk(layer.config.moe_router_topk)
        parts = [p * expert_output(layer, int(e), token) for p, e in zip(values.softmax(-1), experts, strict=True)]
        outputs.append(torch.stack(parts).sum(0))
    return torch.stack(outputs).view_as(x)


def gradients(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Returns the gradient of every parameter."""
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(gradient is not None for gradient in found.values()), found
    return {name: gradient for name, gradient in found.items() if gradient is not None}
