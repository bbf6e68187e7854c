"""The GPT that benchmarks train: 8 layers, width 512, 8 heads, vocabulary 32k, 58.7 M parameters untied."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, HEADS, VOCABULARY = 8, 512, 8, 32_768
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", "4"))


def build_model(max_sequence: int = 256, vocabulary: int = VOCABULARY, **fields: Any) -> nn.Module:
    """Returns a GPT with the same weights in every process; `fields` are of its config."""
    from core.models.gpt import GPTModel
    from core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )
    return GPTModel(config, vocab_size=vocabulary, max_sequence_length=max_sequence, position_embedding_type="rope")


def micro_batches(samples: int = 2, sequence: int = 256) -> list[torch.Tensor]:
    """Returns this rank's tokens of a step, `[b, s + 1]` each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (samples, sequence + 1)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(MICRO_BATCHES)]


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    """One micro-batch `[b, s + 1]`, whose loss is its share of the step's."""
    losses = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
    (losses.mean() / MICRO_BATCHES).backward()


def parameter_bytes() -> int:
    """Bytes of the whole model's parameters."""
    return sum(p.numel() * p.element_size() for p in build_model().parameters())
