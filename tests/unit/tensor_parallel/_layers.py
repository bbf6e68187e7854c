"""Layers whose arithmetic is exact: small integers, so that every order of addition gives the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.model_parallel_config import ModelParallelConfig

S, B, H, OUT, V = 6, 2, 4, 10, 12
"""Sequence, batch, input and output of a linear layer, vocabulary: two ranks divide S, H, OUT and V."""


def integers(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randint(-4, 5, tensor.shape, generator=generator))


def normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(0.0, 0.02, generator=generator)


def integer_tensor(*shape: int, seed: int = 7) -> torch.Tensor:
    """Returns the same on every rank, independent of earlier draws."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def config(tp: int = 1, sequence_parallel: bool = False) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def all_gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat(everyones(tensor), dim)


def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def pair(cls: type[nn.Module], *sizes: int, sequence_parallel: bool = False, **options: Any) -> list[nn.Module]:
    """Returns the serial layer and this rank's part of it, with equal values because both have one seed."""
    layers_built = []
    for tp, group in ((1, None), (2, dist.group.WORLD)):
        torch.manual_seed(0)
        built = cls(
            *sizes, config=config(tp, sequence_parallel and tp > 1), init_method=integers, tp_group=group, **options
        )
        if getattr(built, "bias", None) is not None:  # they start at zero, which a lost bias would equal
            whole = integer_tensor(OUT, seed=3)
            with torch.no_grad():
                built.bias.copy_(own(whole, 0) if built.bias.shape != whole.shape else whole)
        layers_built.append(built)
    return layers_built
