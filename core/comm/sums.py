"""Adds the pieces that ranks have exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def store(output: Tensor, result: Tensor, scale: float, accumulate: bool) -> None:
    """Writes `result * scale` into `output`, or adds it with `accumulate`; only without may both be one tensor."""
    if accumulate:
        output.add_(result, alpha=scale)
        return
    if output.data_ptr() != result.data_ptr():
        output.copy_(result)
    if scale != 1.0:
        output.mul_(scale)


def add_in_rank_order(addends: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Computes ``((a0 + a1) + a2) + ...`` into `out`, which may be one of the addends; the first addend is scratch.

    Every addition has the precision of `out`. With `out` None the sum is left in the first addend.
    """
    if out is not None and out.dtype != addends[0].dtype:
        total = out.copy_(addends[0])
        for addend in addends[1:]:
            total.add_(addend)
        return total
    total = addends[0]
    for addend in addends[1:-1]:
        total.add_(addend)
    return torch.add(total, addends[-1], out=total if out is None else out)
