"""The architecture of a GPT, independent of its layout: two models that share it can exchange weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...dist_checkpointing import model_state_dict
from ...errors import CheckpointError
from ...transformer.attention import SelfAttention
from ...transformer.lora import is_adapter
from ...transformer.mlp import MLP
from ...transformer.norms import LayerNorm, RMSNorm
from ...transformer.transformer_config import TransformerConfig
from ...transformer.transformer_layer import TransformerLayer
from ..common.embeddings.language_model_embedding import PositionEmbeddingType
from .gpt_model import GPTModel

TRANSFORMER_FIELDS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("normalization", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "qk_layernorm"),
    *("rotary_percent", "rotary_base", "layernorm_epsilon"),
)
"""Fields of `TransformerConfig` that decide what the model computes."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A GPT without its weights."""

    transformer: Mapping[str, Any]
    """Values of the :data:`TRANSFORMER_FIELDS`, by name."""
    vocab_size: int
    """Rows of the embedding without padding, which a model may add."""
    max_sequence_length: int
    tied: bool
    """Whether the output projection uses the embedding's weight."""
    position_embedding_type: PositionEmbeddingType

    def __getitem__(self, name: str) -> Any:
        return self.transformer[name]

    def build(self, *, vocab_size: int | None = None, **fields: Any) -> GPTModel:
        """Builds a model of this architecture.

        Args:
            fields: further fields of its config, such as parallel degrees, dropout and initialisation.
        """
        config = TransformerConfig(**{**self.transformer, **fields})
        return GPTModel(
            config,
            vocab_size=vocab_size or self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type=self.position_embedding_type,
        )

    def differences(self, other: Architecture) -> list[str]:
        """Lists the differences to `other`, each as "field this and that", except sizes of tables."""
        rotary = () if self.position_embedding_type == "rope" else ("rotary_percent", "rotary_base")
        names = [name for name in TRANSFORMER_FIELDS if name not in rotary]
        differing = [f"{name} {self[name]!r} and {other[name]!r}" for name in names if self[name] != other[name]]
        for name in ("tied", "position_embedding_type"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                differing.append(f"{name} {ours!r} and {theirs!r}")
        return differing


def gpt_of(model: nn.Module) -> GPTModel:
    """Returns the `GPTModel` in `model`, through wrappers of any kind.

    Raises:
        CheckpointError: there is none.
    """
    gpt = next((module for module in model.modules() if isinstance(module, GPTModel)), None)
    if gpt is None:
        raise CheckpointError(f"{type(model).__name__} holds no GPTModel, and only GPTs are translated; give one")
    return gpt


def architecture_of(model: GPTModel) -> Architecture:
    """Returns the architecture of a model.

    Raises:
        CheckpointError: the model has experts, or its layers come from a spec and differ from those that its config
            describes.
    """
    _check_layers(model)
    described = {name: getattr(model.config, name) for name in TRANSFORMER_FIELDS}
    return Architecture(
        transformer={**described, "rotary_percent": model.rotary_percent, "rotary_base": model.rotary_base},
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        tied=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )


def _check_layers(model: GPTModel) -> None:
    config = model.config
    if config.num_moe_experts is not None:
        raise CheckpointError(
            f"the model has experts (num_moe_experts {config.num_moe_experts}), and only dense models are translated "
            "from and to other layouts; use core.dist_checkpointing"
        )
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    for number, layer in enumerate(model.decoder.layers):
        attention = getattr(layer, "self_attention", None)
        as_described = (
            isinstance(layer, TransformerLayer)
            and isinstance(attention, SelfAttention)
            and isinstance(layer.mlp, MLP)
            and isinstance(layer.input_layernorm, norm)
            and isinstance(layer.pre_mlp_layernorm, norm)
            and isinstance(attention.q_layernorm, norm)
            == isinstance(attention.k_layernorm, norm)
            == config.qk_layernorm
        )
        if not as_described:
            raise CheckpointError(
                f"layer {number} of the model was built by a transformer_layer_spec, and is not what its config says "
                f"(normalization {config.normalization!r}, qk_layernorm {config.qk_layernorm}); only models that the "
                "config describes are translated"
            )


def base_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns `model_state_dict` of a model without the tensors of LoRA adapters."""
    return {name: tensor for name, tensor in model_state_dict(model).items() if not is_adapter(name)}
