"""Totals over all micro-batches and ranks that do not depend on how ranks share the micro-batches.

Each addend is cut into two numbers of 28 bits, multiples of units that the largest addend decides. Sums of such
numbers are exact in double, in any order. The host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.collectives import all_gather
from ..optimizer.exact_squares import power_of_two

_BITS = 28
"""Of each of the two numbers: 2^24 of them add up in the 53 bits of double."""

_LARGEST_EXPONENT = 900
"""Largest exponent of an addend; addends above it, or below its negative, lose bits."""


def exact_totals(rows: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Sums each column over the rows of all ranks, rounded once; the result does not depend on the order of rows.

    Exact for fp32 addends of at least 2^-32 of the largest one. Smaller addends lose their last bits, each by itself.
    If an addend is not finite, the sum is not finite.

    Args:
        rows: a row `[n]` for each micro-batch of this rank; every rank has as many.

    Returns:
        `[n]` in double, on the device of the rows.
    """
    own = torch.stack(list(rows)).double()
    gathered = own.new_empty(group.size() * own.numel())
    all_gather(gathered, own.flatten(), group, what="the losses of micro-batches")
    return sum_in_any_order(gathered.view(-1, own.shape[1]))


def sum_in_any_order(addends: Tensor) -> Tensor:
    """Sums `[m, n]`, in double, over m, as :func:`exact_totals` does."""
    largest = addends.abs().amax(0)
    finite = largest.isfinite()
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent.long()
    exponent = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    rest, total = addends, torch.zeros_like(largest)
    for part in (1, 2):
        anchor = 1.5 * power_of_two(exponent + 52 - part * _BITS)
        high = (rest + anchor) - anchor  # the nearest multiples of the anchor's last bit
        rest = rest - high
        total = total + high.sum(0)
    return torch.where(finite, total, addends.sum(0))
