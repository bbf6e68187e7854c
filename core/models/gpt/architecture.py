"""The architecture of a GPT, independent of its layout: two models that share it can exchange weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...base.errors import CheckpointError
from ...base.module_protocol import settle_parameters
from ...dist_checkpointing.model_state import stages_state_dict
from ...transformer.attention import SelfAttention
from ...transformer.lora import is_adapter
from ...transformer.mlp import MLP
from ...transformer.moe.moe_layer import MoELayer
from ...transformer.moe_config import ARCHITECTURE_OF_EXPERTS
from ...transformer.norms import LayerNorm, RMSNorm
from ...transformer.transformer_config import TransformerConfig
from ...transformer.transformer_layer import TransformerLayer
from ..common.embeddings.language_model_embedding import PositionEmbeddingType
from .gpt_model import GPTModel

HF_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hf_layouts.json").read_text("utf-8"))
"""What is known of config files of Hugging Face."""

Layout = Literal["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "gpt2"]
"""Kinds of model that Hugging Face's ``model_type`` names."""

HF_LAYOUTS: dict[Layout, dict[str, Any]] = HF_TABLES["layouts"]  # type: ignore[assignment]
"""By kind: the ``class``, ``names`` there of our fields, ``constants`` that are written, values that it ``takes`` of
settings that change what a model computes, and names of sizes of ``experts``, of which the first is written."""

TRANSFORMER_FIELDS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("normalization", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "qk_layernorm"),
    *("rotary_percent", "rotary_base", "layernorm_epsilon"),
)
"""Fields of `TransformerConfig` that decide what the model computes, but for experts."""

EXPERT_FIELDS = ("num_moe_experts", *ARCHITECTURE_OF_EXPERTS)
"""Fields of `TransformerConfig` about experts. A limit of their tokens (`moe_expert_capacity_factor`) is a setting of
a run: files of other projects have none."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A GPT without its weights."""

    transformer: Mapping[str, Any]
    """Values of the :data:`TRANSFORMER_FIELDS` and :data:`EXPERT_FIELDS`, by name, as :func:`model_fields` returns
    them. Without experts the latter are only `num_moe_experts`, None."""
    vocab_size: int
    """Rows of the embedding without padding, which a model may add."""
    max_sequence_length: int
    ties_embeddings: bool
    """Whether the output projection uses the embedding's weight."""
    position_embedding_type: PositionEmbeddingType

    def __getitem__(self, name: str) -> Any:
        return self.transformer[name]

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, has experts."""
        pattern = self["moe_layer_freq"] if self["num_moe_experts"] is not None else 0
        return bool(pattern if isinstance(pattern, int) else pattern[layer])

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
            share_embeddings_and_output_weights=self.ties_embeddings,
            position_embedding_type=self.position_embedding_type,
        )

    def differences(self, other: Architecture) -> list[str]:
        """Lists the differences to `other`, each as "field this and that", except sizes of tables."""
        differing = differing_fields(self.transformer, other.transformer)
        if self.position_embedding_type != "rope":
            differing = [difference for difference in differing if not difference.startswith("rotary_")]
        for name in ("ties_embeddings", "position_embedding_type"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                differing.append(f"{name} {ours!r} and {theirs!r}")
        return differing


def gpt_of(model: nn.Module | Sequence[nn.Module]) -> GPTModel:
    """Returns the `GPTModel` in `model`, through wrappers of any kind, or of several pipeline stages the first.

    Raises:
        CheckpointError: there is none.
    """
    model = model if isinstance(model, nn.Module) else model[0]
    if (gpt := next((module for module in model.modules() if isinstance(module, GPTModel)), None)) is None:
        raise CheckpointError(f"{type(model).__name__} holds no GPTModel, and only GPTs are translated; give one")
    return gpt


def architecture_of(model: GPTModel) -> Architecture:
    """Returns the architecture of a model.

    Raises:
        CheckpointError: the model's layers come from a spec and differ from those that its config describes.
    """
    _check_layers(model)
    return Architecture(
        transformer={
            **model_fields(model.config),
            "rotary_percent": model.rotary_percent,
            "rotary_base": model.rotary_base,
        },
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        ties_embeddings=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )


def model_fields(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of an `Architecture`, with equal values where models compute the same."""
    fields = {name: getattr(config, name) for name in TRANSFORMER_FIELDS}
    fields["add_qkv_bias"] = config.add_qkv_bias and not config.add_bias_linear
    if config.num_moe_experts is None:
        return fields | {"num_moe_experts": None}
    fields |= {name: getattr(config, name) for name in EXPERT_FIELDS}
    layers = [int(config.has_experts(number)) for number in range(1, config.num_layers + 1)]
    fields |= {"moe_layer_freq": layers, "moe_ffn_hidden_size": config.expert_ffn_size}
    if all(layers):
        fields |= {"moe_layer_freq": 1, "ffn_hidden_size": config.expert_ffn_size}  # no layer has an MLP
    if config.moe_router_score_function != "softmax":
        fields["moe_router_pre_softmax"] = False
    if config.moe_router_num_groups == 1:
        fields |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if config.moe_router_topk_scaling_factor == 1:
        fields["moe_router_topk_scaling_factor"] = None
    return fields


def differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Lists the fields in which two results of :func:`model_fields` differ, each as "field this and that"."""
    names = [name for name in ours if name in theirs and name != "moe_router_dtype"]  # a precision
    return [f"{name} {ours[name]!r} and {theirs[name]!r}" for name in names if ours[name] != theirs[name]]


def _check_layers(model: GPTModel) -> None:
    config = model.config
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    for number, layer in enumerate(model.decoder.layers, start=model.stage.layers.start):
        attention = getattr(layer, "self_attention", None)
        as_described = (
            isinstance(layer, TransformerLayer)
            and isinstance(attention, SelfAttention)
            and isinstance(layer.mlp, MoELayer if config.has_experts(number + 1) else MLP)
            and isinstance(layer.input_layernorm, norm)
            and isinstance(layer.pre_mlp_layernorm, norm)
            and isinstance(attention.q_layernorm, norm)
            == isinstance(attention.k_layernorm, norm)
            == config.qk_layernorm
        )
        if not as_described:
            raise CheckpointError(
                f"layer {number} of the model was built by a transformer_layer_spec, and is not what its config says "
                f"(normalization {config.normalization!r}, qk_layernorm {config.qk_layernorm}); only those are read"
            )


def base_state_dict(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns `stages_state_dict` of the GPT in a model, or in its pipeline stages, without LoRA adapters' tensors."""
    stages = [gpt_of(stage) for stage in ([model] if isinstance(model, nn.Module) else model)]
    return {name: tensor for name, tensor in stages_state_dict(stages).items() if not is_adapter(name)}


def tensors_to_write(model: nn.Module | Sequence[nn.Module], kind: str) -> dict[str, torch.Tensor]:
    """Returns `base_state_dict` once the last update has arrived.

    Args:
        kind: what the tensors are written as.

    Raises:
        CheckpointError: the model has LoRA adapters.
    """
    wrappers = [model] if isinstance(model, nn.Module) else model
    settle_parameters(*wrappers)
    ours = stages_state_dict([gpt_of(wrapper) for wrapper in wrappers])
    if any(map(is_adapter, ours)):
        raise CheckpointError(
            f"the model has LoRA adapters, which a {kind} has no place for; merge them first "
            "(shardstack.transformer.lora.merge_lora)"
        )
    return ours
