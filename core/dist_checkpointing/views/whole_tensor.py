"""Gathers one tensor of the whole model from the pieces that ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .flat_range import FlatRange


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor that is a shard or a flat range on each rank whole, detached; every rank of the world calls it.

    Holds a flat range's tensor three times while it is gathered.
    """
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full.detach()
    if not isinstance(tensor, FlatRange):
        return tensor.detach()
    found = torch.zeros(2, *tensor.shape, dtype=tensor.held.dtype, device=tensor.held.device)
    for offsets, piece in tensor.pieces():
        place = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
        found[0][place] = piece
        found[1][place] = 1.0
    dist.all_reduce(found)
    return found[0] / found[1]  # replicas of a hybrid have the same range: 2 x / 2 is x again
