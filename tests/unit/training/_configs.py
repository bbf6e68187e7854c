"""A small valid run, to be changed in one place by each test, its model and its batches."""

from __future__ import annotations

from typing import Any

import torch

from core.base.device import current_device
from core.models.gpt import GPTModel
from core.training.config import PretrainConfig
from core.training.config.build import build_config
from core.training.data import Batch
from tests.unit._gpt import gpt_of

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


def model_of(config: PretrainConfig) -> GPTModel:
    torch.manual_seed(3)
    return gpt_of(config.model, True, _vocab_size(config), config.data.seq_length)


def _vocab_size(config: PretrainConfig) -> int:
    return 4 * config.data.seq_length


def batches(config: PretrainConfig, rank: int, count: int, packed: bool = False) -> list[Batch]:
    """Makes micro-batches whose numbers of tokens that count differ, between micro-batches and between ranks. Packed
    documents begin elsewhere in each row."""
    generator = torch.Generator().manual_seed(10 + rank)
    size, length = config.data.micro_batch_size, config.data.seq_length
    places = torch.arange(length).expand(size, length)
    made: list[Batch] = []
    for i in range(count):
        tokens = torch.randint(0, _vocab_size(config), (size, length + 1), generator=generator)
        mask = torch.ones(size, length)
        mask[0, : 2 + i + 3 * rank] = 0.0
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": places}
        made.append({name: tensor.contiguous().to(current_device()) for name, tensor in batch.items()})
        if packed:
            cut = torch.randint(1, length, (size, 1), generator=generator)
            made[-1]["document_starts"] = torch.where(places >= cut, cut, 0)
    return made
