"""One small model's tensors, whole and cut in every way that the tests need."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from core import parallel_state
from core.dist_checkpointing import flat_range_view, model_state_dict

Shapes = dict[str, tuple[tuple[int, ...], int | None]]

SHAPES: Shapes = {
    "columns.weight": ((6, 5), 0),  # over two data-parallel ranks, 3 rows of a tp piece are uneven
    "columns.bias": ((6,), 0),
    "rows.weight": ((5, 4), 1),
    "norm.weight": ((7,), None),
    "thin.weight": ((1, 3), None),  # fewer rows than ranks: one piece is empty
    "vocabulary.weight": ((2, 3), 0),
}
"""Whole shape and the dimension that tensor parallelism cuts."""


def whole(name: str, shapes: Shapes = SHAPES) -> torch.Tensor:
    """Makes values that tell every tensor and every element apart."""
    shape = shapes[name][0]
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 3 + 100 * list(shapes).index(name)


class Toy(nn.Module):
    """Holds this rank's tensor-parallel pieces of all SHAPES, zero or filled, and a buffer."""

    def __init__(self, *, filled: bool, dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES) -> None:
        super().__init__()
        self.shapes = shapes
        for name, (shape, dim) in shapes.items():
            owner, leaf = name.split(".")
            if not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            value = whole(name, shapes) if filled else torch.zeros(shape)
            self.get_submodule(owner).register_parameter(leaf, tp_piece(value.to(dtype), dim))
        self.register_buffer("steps", torch.tensor(11 if filled else 0))

    def shard(self, mesh: DeviceMesh) -> Toy:
        for child in self.children():
            fully_shard(child, mesh=mesh)
        fully_shard(self, mesh=mesh)
        for name, param in self.named_parameters():
            mark(param, self.shapes[name][1])  # torch drops the attributes; the wrapper puts them back
        return self


def tp_piece(value: torch.Tensor, dim: int | None) -> nn.Parameter:
    """Returns this tp rank's parameter of `value`, cut along `dim`, with Megatron's attributes."""
    if dim is None:
        return nn.Parameter(value.clone())
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return mark(nn.Parameter(value.chunk(size, dim)[rank].clone()), dim)


def mark(param: nn.Parameter, dim: int | None) -> nn.Parameter:
    if dim is not None:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
    return param


def toy(layout: str, *, filled: bool, dtype: torch.dtype = torch.float32) -> Toy:
    """Builds a toy. ``"plain"``: no parallel state; else words of ``tp2``, ``fsdp``, ``hybrid`` and ``flat`` (whole
    parameters)."""
    words = layout.split()
    if words == ["plain"]:
        return Toy(filled=filled, dtype=dtype)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        2 if "tp2" in words else 1, num_distributed_optimizer_instances=2 if "hybrid" in words else 1
    )
    model = Toy(filled=filled, dtype=dtype)
    sharded = {"fsdp", "hybrid"} & set(words) and "flat" not in words
    return model.shard(parallel_state.get_data_parallel_mesh()) if sharded else model


def state_of(layout: str, *, filled: bool) -> tuple[Toy, dict[str, torch.Tensor]]:
    """Returns a toy and its state; with the word ``flat`` this rank's runs of elements, cut at odd places."""
    model = toy(layout, filled=filled)
    if "flat" not in layout:
        return model, model_state_dict(model)
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True, partial_data_parallel=True)
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
    state = {"steps": model.steps}
    for name, param in model.named_parameters():
        bounds = [0, *(min(3 + param.numel() * part // size, param.numel()) for part in range(1, size)), param.numel()]
        start, end = list(pairwise(bounds))[rank]
        state[name] = flat_range_view(param, param.detach().view(-1)[start:end].clone(), start)
    return model, state


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))
