"""A sum of squares that depends neither on the order of its addends nor on how they are cut.

All ranks agree on a unit, 2^-46 of the square of the power of two above the largest magnitude. Each square, computed
in double, is rounded to a multiple of it; the sum of these integers is exact, in any order. The rounding is of each
element alone, so that the sum depends on the elements and on nothing else; it is off by half a unit an element at
most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BITS = 46
"""Of a square; 2^16 of them add up in 62 bits."""

CHUNK_ELEMENTS = 1 << 16
"""Elements that are squared at a time on CPU: 512 KiB, which a core's cache holds."""

_DEVICE_CHUNK_ELEMENTS = 1 << 24
_LOW_BITS = 32
_LEAST_EXPONENT = -1020
"""Even, and above those of subnormal numbers."""


def largest_magnitude(grads: Sequence[Tensor]) -> float:
    """Returns the largest absolute value; infinity if any value is not finite."""
    on_host = [extreme for grad in grads if grad.device.type == "cpu" for extreme in torch.aminmax(grad)]
    on_device = [grad for grad in grads if grad.device.type != "cpu"]
    found = [abs(extreme.item()) for extreme in on_host]
    if on_device:
        found.append(torch.stack(torch._foreach_norm(on_device, math.inf)).max().item())
    return max((value if value < math.inf else math.inf for value in found), default=0.0)  # NaN is in no order


def exponent_of_unit(largest: float) -> int | None:
    """Returns the exponent, even, of the unit for these magnitudes; None where a square exceeds what double holds."""
    exponent = 2 * math.frexp(largest)[1] if math.isfinite(largest) else 1 << 20
    return None if exponent > 1023 - 53 + _BITS else max(exponent - _BITS, _LEAST_EXPONENT)


def sum_of_squares(grads: Iterable[Tensor], exponent: int) -> int:
    """Returns the sum in units of ``2^exponent``."""
    total = 0
    buffer = torch.empty(CHUNK_ELEMENTS, dtype=torch.float64)
    anchor = math.ldexp(1.5, 52 + exponent)  # numbers just above it are multiples of the unit
    bits = int(torch.tensor(anchor, dtype=torch.float64).view(torch.int64))
    for grad in grads:
        if grad.device.type == "cpu":
            for chunk in grad.reshape(-1).split(CHUNK_ELEMENTS):
                double = buffer[: chunk.numel()].copy_(chunk)
                units = double.mul_(double).add_(anchor).view(torch.int64)  # the anchor's bits, plus the units
                total += _signed(int(units.sum()) - chunk.numel() * bits)
        else:
            for chunk in grad.reshape(-1).split(_DEVICE_CHUNK_ELEMENTS):
                units = chunk.double().square_().add_(anchor).view(torch.int64).sub_(bits)
                high, low = (units >> _LOW_BITS).sum(), (units & ((1 << _LOW_BITS) - 1)).sum()
                total += (int(high) << _LOW_BITS) + int(low)
    return total


def digits_of(total: int) -> list[int]:
    """Returns two digits whose sums over ranks fit in 64 bits."""
    return [total >> _LOW_BITS, total & ((1 << _LOW_BITS) - 1)]


def root_of_digits(digits: Sequence[int], exponent: int) -> float:
    """Returns the square root of a sum of `digits_of`, in units of ``2^exponent``."""
    high, low = digits
    return math.ldexp(math.sqrt((high << _LOW_BITS) + low), exponent // 2)


def _signed(number: int) -> int:
    """Returns the number of 64 bits with a sign that equals `number` modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
