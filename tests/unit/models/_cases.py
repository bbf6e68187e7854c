"""The kinds of GPT that every test of equality runs over: each choice of the config at least once on both sides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from core.models.gpt import GPTModel
from core.transformer import TransformerConfig

VOCAB, LENGTH, BATCH = 32, 12, 2


class Case(NamedTuple):
    config: dict[str, Any]
    tied: bool
    positions: str


_SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,  # large enough for attention and activations to matter
}

CASES = {
    "gelu-learned-tied": Case(_SMALL, tied=True, positions="learned_absolute"),
    "swiglu-gqa-rope-rms": Case(
        _SMALL
        | {
            "num_query_groups": 2,
            "ffn_hidden_size": 20,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
        },
        tied=False,
        positions="rope",
    ),
    "qk-norm-partial-rope-tied": Case(
        _SMALL
        | {
            "num_query_groups": 2,
            "kv_channels": 8,
            "qk_layernorm": True,
            "rotary_percent": 0.5,
            "rotary_base": 500.0,
            "activation_func": "gelu_tanh",
        },
        tied=True,
        positions="rope",
    ),
    "geglu-rope": Case(_SMALL | {"gated_linear_unit": True}, tied=False, positions="rope"),
}

SMALL = CASES["gelu-learned-tied"]


def small_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SMALL.config | changes))


def build(case: Case, **changes: Any) -> GPTModel:
    """Returns the model of `case`, some fields of its config changed, with whole biases and norms off their trivial
    start."""
    torch.manual_seed(7)
    model = GPTModel(
        TransformerConfig(**(case.config | changes)),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and not parameter.tensor_model_parallel:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes ids and labels, `[b, s]` each."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(100 + number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the L2 norm of the difference over that of `expected`."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
