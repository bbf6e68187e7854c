"""Sums exactly, so that the result depends neither on order nor on sharding: squares, and totals of micro-batches.

All ranks agree on a unit: 2^-46 of the square of the power of two above the largest magnitude. Each square, computed
in double, is rounded to a multiple of the unit; the sum of these integers is exact in any order. Each element is
rounded by itself, so the sum depends only on the elements; its error is at most half a unit for each element. Numbers
stay on the device of the gradients, and the host does not wait.

`exact_totals` cuts each addend into two numbers of 28 bits, multiples of units that the largest addend decides: their
sums are exact in double, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..base.device import current_device, is_on_gpu
from ..comm.collectives import all_gather, all_reduce_by_backend
from .clip_grads import CHUNK_ELEMENTS, GradientStatistics, _Part, number_of_zeros, reduce_over_model

_BITS = 46
"""Bits of a square in units. 2^16 squares sum to 62 bits."""

_DEVICE_CHUNK_ELEMENTS = 1 << 24
_LOW_BITS = 32
_LOW = (1 << _LOW_BITS) - 1
_LEAST_EXPONENT = -1020
"""Smallest exponent of a unit: even, and above the exponents of subnormal numbers."""

_LARGEST_EXPONENT = 1023 - 53 + _BITS
"""Largest result of `_exponent_of_square` for which double holds the anchor of the unit, and squares added to it."""


class ExactStatistics(GradientStatistics):
    """Computes the same bits on any number of ranks. Ranks agree on the largest magnitude first."""

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool = False) -> Tensor:
        """Does what its base does. Waits for the device only if a model on a device has gradients on the host."""
        return self._measure([grads], count_zeros)

    def norms(self, rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Returns the L2 norm of each row: tensors in the order of the parameters, with None where it has none.

        Every rank has to call it. Starts as many all-reduces as `measure` does.

        Returns:
            `[len(rows)]` in double, on the device of this process.
        """
        return self._measure(rows, False)[:-1]

    def _measure(self, rows: Sequence[Sequence[Tensor | None]], count_zeros: bool) -> Tensor:
        """Returns the norm of each row, and the zeros of the first one."""
        device = current_device()
        largest = torch.zeros(len(rows), dtype=torch.float64, device=device)
        for over, parts in self._by_model_group():
            for part in parts:
                of_part = torch.stack([largest_magnitude(part.own_grads(row), device) for row in rows])
                for group in part.groups:
                    all_reduce_by_backend(of_part, group, what="the largest gradient", op=ReduceOp.MAX)
                largest = torch.maximum(largest, of_part)
            reduce_over_model(largest, over, "the largest gradient", ReduceOp.MAX)
        exponents = exponent_of_unit(largest)

        def sums_of(part: _Part) -> Tensor:
            shards = [part.own_grads(row) for row in rows]
            zeros = number_of_zeros(shards[0]).to(device) if shards[0] and count_zeros else largest.new_zeros(())
            digits = [sum_of_squares(of_row, exponent) for of_row, exponent in zip(shards, exponents, strict=True)]
            return torch.cat([*digits, zeros.long().view(1)])

        total = self._add_up(sums_of, torch.zeros(2 * len(rows) + 1, dtype=torch.int64, device=device))
        norms = torch.where(sum_fits(largest), root_of_digits(total[:-1].view(-1, 2).T, exponents), math.inf)
        return torch.cat([norms, total[-1:].double()])


def largest_magnitude(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the largest absolute value, 0-dim in double on `device`, or infinity if any value is not finite."""
    on_host = [extreme.double() for grad in grads if not is_on_gpu(grad) for extreme in torch.aminmax(grad)]
    on_device = [grad for grad in grads if is_on_gpu(grad)]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if on_host:
        largest = torch.stack(on_host).abs().max().to(device)
    if on_device:
        norms = torch._foreach_norm(on_device, math.inf)
        largest = torch.maximum(largest, torch.stack([norm.double() for norm in norms]).max())
    return torch.where(largest < math.inf, largest, math.inf)  # NaN is in no order


def exponent_of_unit(largest: Tensor) -> Tensor:
    """Returns the unit's exponent, an even 0-dim number, for a largest magnitude. Valid only if `sum_fits`."""
    above = _exponent_of_square(largest).clamp(max=_LARGEST_EXPONENT)
    return (above - _BITS).clamp(min=_LEAST_EXPONENT)


def sum_fits(largest: Tensor) -> Tensor:
    """Returns whether double can hold every square, which is False if a value is not finite."""
    return largest.isfinite() & (_exponent_of_square(largest) <= _LARGEST_EXPONENT)


def sum_of_squares(grads: Sequence[Tensor], exponent: Tensor) -> Tensor:
    """Returns the sum in units of ``2^exponent``, as two digits, `[2]`, whose sums over ranks fit in 64 bits."""
    device = exponent.device
    digits = [torch.zeros(2, dtype=torch.int64, device=device)]
    on_host = [grad for grad in grads if not is_on_gpu(grad)]
    if on_host:
        digits.append(_sum_on_host(on_host, exponent.to("cpu") if exponent.is_cuda else exponent).to(device))
    on_device = [chunk for g in grads if is_on_gpu(g) for chunk in g.reshape(-1).split(_DEVICE_CHUNK_ELEMENTS)]
    if on_device:
        anchor = _anchor(exponent)
        bits = anchor.view(torch.int64)
        for chunk in on_device:
            units = chunk.double().square_().add_(anchor).view(torch.int64).sub_(bits)
            digits.append(torch.stack([(units >> _LOW_BITS).sum(), (units & _LOW).sum()]))
    return torch.stack(digits).sum(0)


def root_of_digits(digits: Tensor, exponent: Tensor) -> Tensor:
    """Returns the square root of a sum of `sum_of_squares`, in double, rounded once.

    Args:
        digits: `[2, ...]`, or of several sums with an exponent each.
    """
    high, low = digits.unbind()
    high, low = high + (low >> _LOW_BITS), low & _LOW  # now both are exact in double
    return (high.double() * float(1 << _LOW_BITS) + low.double()).sqrt() * power_of_two(exponent // 2)


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns ``2^exponent`` in double, exactly: by its bits.

    Args:
        exponent: int64, from -1022 to 1023.
    """
    return ((exponent + 1023) << 52).view(torch.float64)


def _exponent_of_square(largest: Tensor) -> Tensor:
    finite = torch.where(largest.isfinite(), largest, 0.0)
    return 2 * torch.frexp(finite).exponent.long()


def _anchor(exponent: Tensor) -> Tensor:
    """Returns a number above which doubles are spaced by ``2^exponent``."""
    return 1.5 * power_of_two(exponent + 52)


def _sum_on_host(grads: Sequence[Tensor], exponent: Tensor) -> Tensor:
    """Returns `sum_of_squares` of CPU tensors, converted to double in chunks."""
    sums, sizes = [], []
    buffer = torch.empty(CHUNK_ELEMENTS, dtype=torch.float64, device="cpu")
    anchor = _anchor(exponent)
    for grad in grads:
        for chunk in grad.reshape(-1).split(CHUNK_ELEMENTS):
            double = buffer[: chunk.numel()].copy_(chunk)
            units = double.mul_(double).add_(anchor).view(torch.int64)  # the anchor's bits, plus the units
            sums.append(units.sum())
            sizes.append(chunk.numel())
    # Sums are modulo 2^64. Without the anchors' bits, the units' sum has at most 62 bits.
    units_of_chunks = torch.stack(sums) - torch.tensor(sizes, device="cpu") * anchor.view(torch.int64)
    return torch.stack([(units_of_chunks >> _LOW_BITS).sum(), (units_of_chunks & _LOW).sum()])


_TOTAL_BITS = 28
"""Bits of each of the two numbers: 2^24 such numbers add up in the 53 bits of double."""

_LARGEST_ADDEND = 900
"""Largest exponent of an addend. Addends above it, or below its negative, lose bits."""


def exact_totals(rows: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Sums each column over the rows of all ranks, rounded once, independently of the order of rows.

    Exact for fp32 addends of at least 2^-32 of the largest one. Smaller addends lose their last bits, each by itself.
    If an addend is not finite, the sum is not finite.

    Args:
        rows: a row `[n]` for each micro-batch of this rank; all ranks have equally many.

    Returns:
        `[n]` in double, on the device of the rows.
    """
    own = torch.stack(list(rows)).double()
    of_ranks = own.new_empty(group.size() * own.numel())
    all_gather(of_ranks, own.flatten(), group, what="the losses of micro-batches")
    return sum_in_any_order(of_ranks.view(-1, own.shape[1]))


def sum_in_any_order(addends: Tensor) -> Tensor:
    """Sums `[m, n]`, in double, over m, as :func:`exact_totals` does."""
    largest = addends.abs().amax(0)
    finite = largest.isfinite()
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent.long()
    exponent = exponent.clamp(-_LARGEST_ADDEND, _LARGEST_ADDEND)
    rest, total = addends, torch.zeros_like(largest)
    for part in (1, 2):
        anchor = 1.5 * power_of_two(exponent + 52 - part * _TOTAL_BITS)
        high = (rest + anchor) - anchor  # the nearest multiples of the anchor's last bit
        rest = rest - high
        total = total + high.sum(0)
    return torch.where(finite, total, addends.sum(0))
