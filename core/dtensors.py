"""The local part of a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor, or a plain tensor itself; shares storage, and stays in the autograd graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
