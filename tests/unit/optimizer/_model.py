"""A small model for whole optimizer steps, with its config and batches."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.optimizer import OptimizerConfig


class Model(nn.Module):
    """Dimensions that neither two ranks nor a vector register divide; `scale` leaves the second rank nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 19)
        self.norm = nn.LayerNorm(19)
        self.second = nn.Linear(19, 7)
        self.scale = nn.Parameter(torch.ones(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b, 9]` to a scalar."""
        return (self.second(torch.relu(self.norm(self.first(x)))) * self.scale).square().sum()


def optimizer_config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.7} | changes))


def batch(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 9, generator=generator) * 3.0


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
