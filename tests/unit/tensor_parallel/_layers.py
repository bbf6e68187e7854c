"""Layers whose arithmetic is exact: small integers, so that every order of addition gives the same bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from core.model_parallel_config import ModelParallelConfig


def integers(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randint(-4, 5, tensor.shape, generator=generator))


def normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(0.0, 0.02, generator=generator)


def integer_tensor(*shape: int, seed: int = 7) -> torch.Tensor:
    """Returns the same on every rank, independent of earlier draws."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def config(tp: int = 1, sequence_parallel: bool = False) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)


def all_gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]
