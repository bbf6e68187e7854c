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


_SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
_SMALL |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_SMALL["init_method_std"] = 0.3  # large enough for attention and activations to matter
_SWIGLU = {"gated_linear_unit": True, "activation_func": "silu", "num_query_groups": 2, "ffn_hidden_size": 20}
_RMS = {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True}
_QK_NORM = {"num_query_groups": 2, "kv_channels": 8, "qk_layernorm": True, "activation_func": "gelu_tanh"}
_PARTIAL_ROPE = {"rotary_percent": 0.5, "rotary_base": 500.0}

CASES = {
    "gelu-learned-tied": Case(_SMALL, tied=True, positions="learned_absolute"),
    "swiglu-gqa-rope-rms": Case(_SMALL | _SWIGLU | _RMS, tied=False, positions="rope"),
    "qk-norm-partial-rope-tied": Case(_SMALL | _QK_NORM | _PARTIAL_ROPE, tied=True, positions="rope"),
    "geglu-rope": Case(_SMALL | {"gated_linear_unit": True}, tied=False, positions="rope"),
}

FUSED: dict[str, Any] = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
FUSED["cross_entropy_fusion_vocab_chunk_size"] = 7
"""Fields of a config whose model makes no whole logits."""

SMALL = CASES["gelu-learned-tied"]


def small_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SMALL.config | changes))


def construct(case: Case, seed: int = 3, vocab_size: int = VOCAB, **changes: Any) -> GPTModel:
    """Returns the model of `case` as it starts, some fields of its config changed."""
    torch.manual_seed(seed)
    return GPTModel(
        TransformerConfig(**(case.config | changes)),
        vocab_size=vocab_size,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
    )


def build(case: Case, **changes: Any) -> GPTModel:
    """Returns the same with whole biases and norms off their trivial start."""
    model = construct(case, seed=7, **changes)
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
