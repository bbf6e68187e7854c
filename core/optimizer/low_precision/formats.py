"""How numbers of 32 bits are kept in 16 and in 8: rounding, and the code books of blocks.

Rounding is stochastic where the nearest value would lose updates that are smaller than half of a step. Its random bits
are a hash of a key and of each element's place in the whole tensor, so that they are the same on every cut.
"""

from __future__ import annotations

import functools
import hashlib
import struct

import torch
from torch import Tensor

BOOKS = ("dynamic8", "linear8")
"""Names of the code books. ``dynamic8``: the dynamic tree of Dettmers (arXiv 1511.04561), as in 8-bit optimizers
(arXiv 2110.02861), whose steps are relative over seven decades. ``linear8``: equal steps. Both have 0 and the largest
element exactly, where published tables end just below 1, so that values that are encoded again keep their codes."""

_DECADES = 7
LEAST_SCALE = 2.0**-100
"""Blocks whose largest element is smaller are kept as zeros: their codes would leave the normal numbers of fp32."""


def key_of(name: str, step: int) -> tuple[int, int]:
    """Returns the key of a tensor's random bits in one step, two numbers of 32 bits with a sign."""
    digest = hashlib.blake2s(f"{name} {step}".encode(), digest_size=8).digest()
    first, second = struct.unpack("<2i", digest)
    return first, second


def random_bits(places: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns 16 random bits of each place, `[n]` in int32: a hash with a round of multiplications for each key.

    Rounds and constants are those of Wellons' "lowbias32" family (github.com/skeeto/hash-prospector).

    Args:
        places: `[n]` in int64, of which 32 bits count.
    """
    bits = places.to(torch.int32).bitwise_xor_(key[0])  # whose products wrap; a shift would move the sign's copies in
    bits ^= bits >> 16 & 0xFFFF
    bits.mul_(0x21F0AAAD).bitwise_xor_(key[1])
    bits ^= bits >> 15 & 0x1FFFF
    bits.mul_(0x735A2D97)
    bits ^= bits >> 15 & 0x1FFFF
    return bits.bitwise_and_(0xFFFF)


def to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to one of the two nearest numbers of bf16, away from zero as often as is right on average.

    Args:
        bits: `[n]`, of `random_bits`.
    """
    rounded = values.view(torch.int32) + bits
    return (rounded & -0x10000).view(torch.float32).to(torch.bfloat16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns fp32 as bf16, rounded to the nearest, and the rest of its bits in int16.

    A value in the middle of two is rounded away from zero, where torch takes the even one.
    """
    bits = values.view(torch.int32)
    upper = bits + 0x8000 >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join(values: Tensor, rest: Tensor) -> Tensor:
    """Returns what `split` was given."""
    return ((values.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)


@functools.cache
def levels_of(book: str, is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the levels of a code book in order, and by code. Code 0 is 0.0, so that zeroed memory is zeros."""
    if book == "linear8":
        most = 127 if is_signed else 255
        positive = torch.arange(1, most + 1, dtype=torch.float64) / most
    else:
        ends = [torch.linspace(0.1, 1.0, (2 - is_signed) * 2**d + 1, dtype=torch.float64) for d in range(_DECADES)]
        decades = [(e[:-1] + e[1:]) / 2 * 10.0 ** (d + 1 - _DECADES) for d, e in enumerate(ends)]
        positive = torch.cat(decades)
        positive = torch.cat([positive[:-1] if is_signed else positive, torch.ones(1, dtype=torch.float64)])
    below = -positive.flip(0) if is_signed else positive[:0]
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), positive]).float()
    codes = torch.zeros(256)
    codes[torch.arange(len(levels)) - len(below)] = levels  # negative ones from the end
    return levels.to(device), codes.to(device)


@functools.cache
def _numbers_below(book: str, is_signed: bool, device: torch.device, to_nearest: bool) -> tuple[Tensor, Tensor]:
    """Returns, by the upper 16 bits of a ratio, the first level for these, and from where on it is the next one.

    Between ratios of the same upper bits there is at most one bound: levels are at least 1/256 of a binade apart. Two
    look-ups take a fifth of `torch.bucketize`'s time on a CPU.

    Args:
        to_nearest: levels begin in the middle between two; else where they are.
    """
    levels, _ = levels_of(book, is_signed, torch.device("cpu"))
    bounds = (levels[1:] + levels[:-1]) / 2 if to_nearest else levels[1:]
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    ends = torch.stack([bits.view(torch.float32), (bits | 0xFFFF).view(torch.float32)]).nan_to_num(0.0)
    first, last = (torch.bucketize(end, bounds, right=True) for end in (ends.amin(0), ends.amax(0)))
    next_bounds = torch.where(last > first, bounds[first.clamp(max=len(bounds) - 1)], torch.inf)
    return first.int().to(device), next_bounds.to(device)


def encode(values: Tensor, scales: Tensor, book: str, is_signed: bool, bits: Tensor | None) -> Tensor:
    """Returns the codes of fp32 values, in uint8.

    Without a sign a value above 0 never gets the code of 0: a second moment of 0 would make an update infinite.

    Args:
        scales: `[n]`, of each value's block.
        bits: `[n]`, of `random_bits`, to round stochastically. None rounds to the nearest level.
    """
    levels, _ = levels_of(book, is_signed, values.device)
    ratios = values / torch.where(scales > 0, scales, 1.0)
    numbers, bounds = _numbers_below(book, is_signed, values.device, bits is None)
    upper_bits = ratios.view(torch.int32) >> 16 & 0xFFFF
    chosen = numbers.index_select(0, upper_bits) + (ratios >= bounds.index_select(0, upper_bits))
    if bits is not None:
        lower, above = chosen, (chosen + 1).clamp(max=len(levels) - 1)
        start, end = levels.index_select(0, lower), levels.index_select(0, above)
        # Of 14 bits: a level that was multiplied by its scale and divided again is that level still.
        share = ((ratios - start) / (end - start) * 0x4000).round()  # the last level's is not a number
        chosen = torch.where((bits & 0x3FFF) < share, lower + 1, lower)
    if not is_signed:
        chosen = torch.maximum(chosen, (ratios > 0).int())
    return (chosen - (len(levels) // 2 if is_signed else 0)).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, book: str, is_signed: bool) -> Tensor:
    """Returns the values of codes in fp32. Scales as in `encode`."""
    _, by_code = levels_of(book, is_signed, codes.device)
    return by_code.index_select(0, codes.int()) * scales
