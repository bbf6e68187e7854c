"""A small valid run, to be changed in one place by each test."""

from __future__ import annotations

from typing import Any

from core.training.config import PretrainConfig
from core.training.config.arguments import build_config

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 8,
    "micro_batch_size": 2,
    "train_iters": 4,
    "lr": 1e-2,
}


def small_config(**changes: Any) -> PretrainConfig:
    return build_config({**SMALL, **changes})
