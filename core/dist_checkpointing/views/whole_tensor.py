"""Gathers one tensor of the whole model from the pieces that ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...comm.by_backend import all_reduce_by_backend
from .flat_range import FlatRange


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor whose shards or flat ranges ranks hold, bit by bit, detached. All ranks call it."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full.detach()
    if not isinstance(tensor, FlatRange):
        return tensor.detach()
    found = torch.zeros(tensor.shape, dtype=tensor.held.dtype, device=tensor.held.device)
    for offsets, piece in tensor.pieces():
        place = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
        found[place] = piece
    # Replicas of a hybrid hold the same range, and a sum of theirs would round: the largest of equal bytes and zeros.
    all_reduce_by_backend(found.view(-1).view(torch.uint8), what="a whole tensor", op=dist.ReduceOp.MAX)
    return found
