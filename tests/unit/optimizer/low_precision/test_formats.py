"""Code books, rounding and random bits, without an optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.optimizer.low_precision import formats
from tests.unit._on_gpu import needs_gpu

CPU = torch.device("cpu")


def _values(is_signed: bool) -> Tensor:
    draws = torch.Generator().manual_seed(5)
    values = torch.randn(400 * 256, generator=draws) * torch.rand(400 * 256, generator=draws) ** 9
    values[:256] = 0.0
    values[256:512] *= 1e-36
    return values if is_signed else values.square()


def _scales(values: Tensor) -> Tensor:
    largest = values.view(-1, 256).abs().amax(1)
    return largest.masked_fill(largest < formats.LEAST_SCALE, 0.0).repeat_interleave(256)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("book", formats.BOOKS)
def test_levels_rise_from_the_largest_to_the_largest(book: str, is_signed: bool) -> None:
    levels, by_code = formats.levels_of(book, is_signed, CPU)
    assert (levels.diff() > 0).all() and levels[-1] == 1.0 and levels[0] == (-1.0 if is_signed else 0.0)
    assert by_code[0] == 0.0 and len(levels) == (255 if is_signed else 256)
    assert set(levels.tolist()) == set(by_code.tolist())
    if is_signed:
        assert torch.equal(levels, -levels.flip(0))


def test_dynamic_levels_are_those_of_the_tree() -> None:
    """Seven decades, each with twice as many levels as the one below: the middles of equal parts."""
    levels, _ = formats.levels_of("dynamic8", True, CPU)
    positive = levels[128:].double()
    assert [int(((positive > 10.0**-d * 1.001 / 10) & (positive < 10.0**-d)).sum()) for d in range(7)] == [
        *(63, 32, 16, 8, 4, 2, 1)  # the largest of 64 is 1 itself
    ]
    assert positive[0].item() == pytest.approx(0.55e-6) and positive[1].item() == pytest.approx(0.325e-5)


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("book", formats.BOOKS)
def test_values_that_are_encoded_again_keep_codes(book: str, is_signed: bool, is_random: bool) -> None:
    values, places = _values(is_signed), torch.arange(400 * 256)
    scales = _scales(values)
    bits = [formats.random_bits(places, formats.key_of("a", step)) if is_random else None for step in range(2)]
    codes = formats.encode(values, scales, book, is_signed, bits[0])
    decoded = formats.decode(codes, scales, book, is_signed)
    assert torch.equal(_scales(decoded), scales)
    assert torch.equal(formats.encode(decoded, scales, book, is_signed, bits[1]), codes)
    levels, _ = formats.levels_of(book, is_signed, CPU)
    gap = levels.diff().max().item() / (1 if is_random else 2)
    off = (decoded - values).abs() / torch.where(scales > 0, scales, 1.0)
    # Values without a sign are never 0 unless they are: below the first level they are that one.
    assert off.max() <= max(gap, levels[1].item() if not is_signed else 0.0) * (1 + 1e-5)
    if not is_signed:
        assert ((decoded > 0) | (values < 2.0**-100)).all()


@pytest.mark.parametrize("to_nearest", [False, True])
@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("book", formats.BOOKS)
def test_looked_up_levels_are_those_that_a_search_finds(book: str, is_signed: bool, to_nearest: bool) -> None:
    levels, _ = formats.levels_of(book, is_signed, CPU)
    bounds = (levels[1:] + levels[:-1]) / 2 if to_nearest else levels[1:]
    draws = torch.Generator().manual_seed(9)
    ratios = (torch.rand(1 << 18, generator=draws) * 2 - 1) * 10 ** (torch.rand(1 << 18, generator=draws) * -8)
    near = [torch.nextafter(bounds, torch.tensor(end)) for end in (2.0, -2.0)]
    ratios = torch.cat([ratios, bounds, *near, torch.tensor([0.0, -0.0, 1.0])]).clamp(-1.0 if is_signed else 0.0, 1.0)
    numbers, next_bounds = formats._numbers_below(book, is_signed, CPU, to_nearest)
    upper = ratios.view(torch.int32) >> 16 & 0xFFFF
    assert torch.equal(numbers[upper] + (ratios >= next_bounds[upper]), torch.bucketize(ratios, bounds, right=True))


def test_a_code_of_zero_is_zero() -> None:
    codes = formats.encode(torch.zeros(5), torch.zeros(5), "dynamic8", True, None)
    assert codes.tolist() == [0] * 5


def test_a_value_and_its_rest_are_exact() -> None:
    draws = torch.Generator().manual_seed(2)
    values = torch.randn(1 << 16, generator=draws) * 10.0 ** torch.randint(-30, 30, (1 << 16,), generator=draws)
    values[:3] = torch.tensor([0.0, -0.0, 1.00390625])  # the last is in the middle of two
    upper, rest = formats.split(values)
    assert upper.dtype == torch.bfloat16 and rest.dtype == torch.int16
    assert torch.equal(formats.join(upper, rest).view(torch.int32), values.view(torch.int32))
    middle = (values.view(torch.int32) & 0x1FFFF) == 0x8000  # of an even number and the next: not rounded to even
    assert middle[2] and torch.equal(upper != values.bfloat16(), middle)


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean error of `n` roundings has a deviation of at most half a step over the root of `n`.

    Bits are a function of the key: the test's outcome is fixed. Of random keys one in 1.7 million would fail by
    chance, at five deviations, on each side.
    """
    n = 1 << 18
    places, draws = torch.arange(n), torch.Generator().manual_seed(1)
    for name, value in (("a", 1.001), ("b", -0.7501), ("c", 3.14159e-8)):
        values = torch.full((n,), value)
        rounded = formats.to_bf16(values, formats.random_bits(places, formats.key_of(name, 7))).double()
        below, above = sorted({x.item() for x in rounded.unique()})
        step = above - below
        assert below < values[0].item() < above
        assert abs(rounded.mean().item() - values[0].item()) <= 5 * step / 2 / math.sqrt(n)
    for book in formats.BOOKS:
        shares = torch.rand(n, generator=draws) * 0.9 + 0.05
        bits = formats.random_bits(places, formats.key_of(book, 3))
        codes = formats.encode(shares, torch.ones(n), book, True, bits)
        levels, _ = formats.levels_of(book, True, CPU)
        off = (formats.decode(codes, torch.ones(n), book, True) - shares).double().mean()
        assert abs(off) <= 5 * levels.diff().max() / 2 / math.sqrt(n)


def test_random_bits_depend_on_place_name_and_step() -> None:
    places = torch.arange(1 << 16)
    bits = {key: formats.random_bits(places, formats.key_of(*key)) for key in (("a", 1), ("a", 2), ("b", 1))}
    for number, one in enumerate(bits.values()):
        assert one.min() >= 0 and one.max() < 1 << 16
        # Each bit is set in half of the places, within five deviations.
        for bit in range(16):
            assert abs((one >> bit & 1).double().mean().item() - 0.5) <= 5 * 0.5 / 256
        for other in [*bits.values()][number + 1 :]:
            agree = (one == other).sum().item()
            assert agree <= 1 + 5 + 1  # one in 65536 by chance
    whole = formats.random_bits(places, formats.key_of("a", 1))
    assert torch.equal(whole[777:5000], formats.random_bits(places[777:5000], formats.key_of("a", 1)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("book", formats.BOOKS)
def test_a_gpu_has_the_codes_of_a_cpu(book: str) -> None:
    values, places = _values(True), torch.arange(400 * 256)
    scales, bits = _scales(values), formats.random_bits(places, formats.key_of("a", 1))
    on_gpu = [tensor.cuda() for tensor in (values, scales, places)]
    assert torch.equal(formats.random_bits(on_gpu[2], formats.key_of("a", 1)).cpu(), bits)
    for own, gpus in ((None, None), (bits, bits.cuda())):
        codes = formats.encode(values, scales, book, True, own)
        assert torch.equal(formats.encode(*on_gpu[:2], book, True, gpus).cpu(), codes)
        assert torch.equal(
            formats.decode(codes.cuda(), on_gpu[1], book, True).cpu(), formats.decode(codes, scales, book, True)
        )
    assert torch.equal(formats.to_bf16(on_gpu[0], bits.cuda()).cpu(), formats.to_bf16(values, bits))
    assert torch.equal(formats.join(*formats.split(on_gpu[0])).cpu(), values)
