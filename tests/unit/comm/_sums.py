"""Addends that show every order and precision of adding, and their sums in one order."""

from __future__ import annotations

import torch

SHARD = 37  # elements a rank
WHAT = "numbers"


def addend_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[size * SHARD]`, of magnitudes so different that every order of adding shows."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 7, (size * SHARD,), generator=generator)
    return (torch.randn(size * SHARD, generator=generator) * 2.0**exponents).to(dtype)


def sum_of(size: int, dtype: torch.dtype, accumulate_in: torch.dtype) -> torch.Tensor:
    """Adds all ranks' addends in a tree, or in rank order if the precision differs from that of the addends."""
    addends = [addend_of(rank, size, dtype).to(accumulate_in) for rank in range(size)]
    if accumulate_in == dtype:
        return added_in_pairs(addends)
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total.to(dtype)


def added_in_pairs(addends: list[torch.Tensor]) -> torch.Tensor:
    while len(addends) > 1:
        addends = [sum(addends[i + 1 : i + 2], addends[i]) for i in range(0, len(addends), 2)]
    return addends[0]
