"""Models and settings for tests of Muon in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.base.module_protocol import FusedRows
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig
from core.transformer import TransformerConfig


class Matrices(nn.Module):
    """Matrices that are wide, tall and square; every size is a multiple of a vector, as torch's kernels compute ends
    in another way."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in {"wide": (16, 40), "tall": (48, 16), "square": (32, 32), "row": (1, 48)}.items():
            values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def config_of(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0} | settings))


def gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, gated_linear_unit=True,
        num_moe_experts=4, moe_layer_freq=[0, 1],
    )  # fmt: skip
    return GPTModel(config, vocab_size=64, max_sequence_length=16)


def optimizers_by_name(optimizer: Any) -> dict[str, str]:
    """Returns the optimizer of each parameter by name."""
    by_main = {id(p): group["optimizer"] for group in optimizer.param_groups for p in group["params"]}
    return {p.name: by_main[id(p.main)] for p in optimizer._params}


class Fused(nn.Module):
    def __init__(self, fused: FusedRows | None, rows: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 32, generator=torch.Generator().manual_seed(3)))
        if fused is not None:
            self.weight.fused_rows = fused  # type: ignore[assignment]


QKV = FusedRows((("q", 4), ("k", 2), ("v", 2)), head_rows=2)


GATED = FusedRows((("gate", 1), ("up", 1)))


GATED_QKV = FusedRows((("q", 2), ("gate", 2), ("k", 2), ("v", 2)), head_rows=2)
