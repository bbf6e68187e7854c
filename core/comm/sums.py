"""Adds the pieces that ranks have exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SumOrder = Sequence[Sequence[int]]
"""Ranks of a group in groups of neighbours: each is added up in a tree, then the sums are. See `add_in_tree`."""


def store(output: Tensor, result: Tensor, scale: float, accumulate: bool) -> None:
    """Writes `result * scale` into `output`, or adds it with `accumulate`; only without may both be one tensor."""
    if accumulate:
        output.add_(result, alpha=scale)
        return
    if output.data_ptr() != result.data_ptr():
        output.copy_(result)
    if scale != 1.0:
        output.mul_(scale)


def add_in_fp32(addends: Sequence[Tensor], out: Tensor) -> Tensor:
    """Computes ``((a0 + a1) + a2) + ...`` into `out` in its precision, that of fp32."""
    total = out.copy_(addends[0])
    for addend in addends[1:]:
        total.add_(addend)
    return total


def add_in_tree(addends: Sequence[Tensor], out: Tensor | None, order: SumOrder | None = None) -> Tensor:
    """Adds neighbours, then the sums of neighbours, ``(a0 + a1) + (a2 + a3)``, into `out`, which may be an addend.

    Each addition rounds to the addends' dtype. All addends are scratch; with `out` None the sum is left in one.

    Args:
        order: indices of addends, by groups that are added up by themselves first; None is all, in order.
    """
    if order is None:
        return _add_neighbours(addends, out)
    sums = [_add_neighbours([addends[index] for index in members], None) for members in order]
    return _add_neighbours(sums, out)


def _add_neighbours(addends: Sequence[Tensor], out: Tensor | None) -> Tensor:
    sums = list(addends)
    while len(sums) > 2:
        sums = [a.add_(b) for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) & ~1 :]
    if len(sums) == 2:
        return torch.add(sums[0], sums[1], out=sums[0] if out is None else out)
    return sums[0] if out is None else out.copy_(sums[0])
