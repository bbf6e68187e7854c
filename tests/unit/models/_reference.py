"""A GPT written once more, one sequence and one head at a time, in fp64 and without any of core's layers.

It reads the parameters of a `GPTModel` by name and is the oracle for its losses and gradients.
"""

from __future__ import annotations

import math

import torch

from core.models.gpt import GPTModel


def reference_losses(
    model: GPTModel,
    parameters: dict[str, torch.Tensor],
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the loss of each token, `[b, s]`. `hidden` `[s, s]` is True where a token must not see another."""
    length = input_ids.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    unseen = future if hidden is None else future | hidden
    rows = [_row_losses(model, parameters, ids, row, unseen) for ids, row in zip(input_ids, labels, strict=True)]
    return torch.stack(rows)


def fp64_parameters(model: GPTModel) -> dict[str, torch.Tensor]:
    """Copies the parameters, by name, in fp64, to collect gradients."""
    return {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}


def _row_losses(
    model: GPTModel, parameters: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    config = model.config
    words = parameters["embedding.word_embeddings.weight"]
    x = words[ids]  # [s, h]
    if model.position_embedding_type == "learned_absolute":
        x = x + parameters["embedding.position_embeddings.weight"][: len(ids)]
    for number in range(config.num_layers):
        layer = _Scope(parameters, f"decoder.layers.{number}.")
        x = x + _attention(model, layer, _norm(model, layer, "input_layernorm", x), unseen)
        x = x + _mlp(model, layer, _norm(model, layer, "pre_mlp_layernorm", x))
    x = _norm(model, _Scope(parameters, "decoder."), "final_layernorm", x)
    logits = x @ (words if model.share_embeddings_and_output_weights else parameters["output_layer.weight"]).T
    return logits.exp().sum(-1).log() - logits[torch.arange(len(ids)), labels]


class _Scope:
    def __init__(self, parameters: dict[str, torch.Tensor], prefix: str) -> None:
        self.parameters, self.prefix = parameters, prefix

    def get(self, name: str) -> torch.Tensor | None:
        return self.parameters.get(self.prefix + name)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.get(f"{name}.bias")
        x = x @ self.parameters[f"{self.prefix}{name}.weight"].T
        return x if bias is None else x + bias


def _norm(model: GPTModel, scope: _Scope, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = scope.get(f"{name}.weight"), scope.get(f"{name}.bias")
    if model.config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + model.config.layernorm_epsilon).sqrt() * weight
    return x if bias is None else x + bias


def _attention(model: GPTModel, layer: _Scope, x: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    config = model.config
    size, per_group = config.kv_channels, config.num_attention_heads // config.num_query_groups
    mixed = layer.linear("self_attention.linear_qkv", x)
    heads = []
    for group in mixed.split((per_group + 2) * size, dim=-1):
        *queries, key, value = group.split(size, dim=-1)
        key = _turned(model, _head_norm(model, layer, "k_layernorm", key))
        for query in queries:
            query = _turned(model, _head_norm(model, layer, "q_layernorm", query))
            scores = (query @ key.T / math.sqrt(size)).masked_fill(unseen, -math.inf)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            heads.append(weights / weights.sum(-1, keepdim=True) @ value)
    return layer.linear("self_attention.linear_proj", torch.cat(heads, dim=-1))


def _head_norm(model: GPTModel, layer: _Scope, name: str, x: torch.Tensor) -> torch.Tensor:
    return _norm(model, layer, f"self_attention.{name}", x) if model.config.qk_layernorm else x


def _turned(model: GPTModel, x: torch.Tensor) -> torch.Tensor:
    """Returns each pair of channels (i, i + r / 2) as one complex number, times e^(i angle)."""
    if model.position_embedding_type != "rope":
        return x
    half = int(model.config.kv_channels * model.config.rotary_percent) // 2
    frequencies = model.config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)
    turned = torch.complex(x[:, :half], x[:, half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[:, 2 * half :]), dim=-1)


def _mlp(model: GPTModel, layer: _Scope, x: torch.Tensor) -> torch.Tensor:
    hidden = layer.linear("mlp.linear_fc1", x)
    if model.config.gated_linear_unit:
        return layer.linear("mlp.linear_fc2", _activation(model, hidden[:, 0::2]) * hidden[:, 1::2])
    return layer.linear("mlp.linear_fc2", _activation(model, hidden))


def _activation(model: GPTModel, x: torch.Tensor) -> torch.Tensor:
    if model.config.activation_func == "silu":
        return x / (1 + (-x).exp())
    if model.config.activation_func == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
