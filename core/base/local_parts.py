"""The part of a tensor that this rank has: of a DTensor its shard, of a parameter in flat memory a range of elements.

The wrapper notes the range on the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor, or a plain tensor itself. Shares storage, and stays in the autograd graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_RANGE = "held_range"
"""An attribute of a parameter: its elements on this rank. Set by `keep_range` when the model is wrapped, to None
inside `whole_parameters`. The elements are a view of the wrapper's memory, valid as long as the wrapper exists."""


def keep_range(param: Tensor, kept: tuple[Tensor, int] | None) -> None:
    """Notes on a parameter which of its elements this rank keeps, and where.

    Args:
        kept: `[n]`, contiguous: the elements, and the first one's place in the flattened parameter. None where the
            parameter itself has its values.
    """
    setattr(param, _RANGE, kept)


def kept_range(param: Tensor) -> tuple[Tensor, int] | None:
    """Returns what `keep_range` has noted."""
    elements: tuple[Tensor, int] | None = getattr(param, _RANGE, None)
    return elements


def fill_range(param: Tensor, whole: Tensor) -> None:
    """Copies this rank's elements from `whole`, of the parameter's shape, and counts that as a write to it."""
    kept = kept_range(param)
    if kept is not None:
        values, start = kept
        values.copy_(whole.detach().reshape(-1)[start : start + len(values)])
        torch.autograd.graph.increment_version(param)
