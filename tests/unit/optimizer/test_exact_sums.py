"""Exact sums: the same however addends are cut and ordered. Squares for norms, and losses against `math.fsum`."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from core.optimizer.clip_grads import GradientStatistics
from core.optimizer.distrib_optimizer import gradient_statistics
from core.optimizer.exact_sums import (
    ExactStatistics,
    exponent_of_unit,
    largest_magnitude,
    power_of_two,
    root_of_digits,
    sum_fits,
    sum_in_any_order,
    sum_of_squares,
)
from core.process_groups_config import ProcessGroupCollection

CPU = torch.device("cpu")


def _norm(grads: list[torch.Tensor], ranks: int = 1) -> float:
    """Returns the norm of gradients that are dealt out to `ranks`."""
    largest = largest_magnitude(grads, CPU)
    assert sum_fits(largest)
    exponent = exponent_of_unit(largest)
    digits = sum(sum_of_squares(grads[rank::ranks], exponent) for rank in range(ranks))
    return root_of_digits(digits, exponent).item()


def _sum(values: torch.Tensor) -> tuple[Fraction, Fraction]:
    """Returns the sum of squares and its unit."""
    exponent = exponent_of_unit(largest_magnitude([values], CPU))
    high, low = sum_of_squares([values], exponent).tolist()
    unit = Fraction(2) ** int(exponent)
    return ((high << 32) + low) * unit, unit


def _values(scale: float, dtype: torch.dtype, count: int = 200_003) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(2, count, generator=generator, dtype=torch.float64).prod(0)
    return (spread.pow(3) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 3e-30, 7e25])
def test_sum_is_bitwise_for_any_cut_and_order(scale: float, dtype: torch.dtype):
    values = _values(scale, dtype)
    expected = _norm([values])
    assert all(_norm(list(values.split(777)), ranks) == expected for ranks in (1, 2, 8))
    assert _norm([values[5:], values[:5]]) == expected
    assert _norm([values[torch.randperm(len(values))]]) == _norm([values.flip(0)]) == expected


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_sum_error_bound(scale: float):
    values = _values(scale, torch.float32, 10_001)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    actual, unit = _sum(values)
    assert abs(actual - exact) <= len(values) * unit / 2
    assert abs(actual - exact) / exact < 1e-9  # far below fp32's resolution, to which the norm is rounded
    assert _norm([values]) == math.sqrt(actual)  # rounded once to double, and by the root


def test_values_that_are_not_finite_or_zero():
    assert largest_magnitude([torch.tensor([1.0, math.nan]), torch.ones(3)], CPU) == math.inf
    assert largest_magnitude([torch.ones(3), torch.tensor([-math.inf])], CPU) == math.inf
    assert largest_magnitude([], CPU) == 0.0
    for largest in (math.inf, 1e300):
        assert not sum_fits(torch.tensor(largest, dtype=torch.float64))
    assert _norm([torch.zeros(4)]) == _norm([]) == 0.0
    assert _norm([torch.tensor([3.0, -4.0])]) == 5.0


def test_many_large_squares_do_not_overflow():
    values = torch.full((3 << 20,), 0.999999)
    actual, _ = _sum(values)
    assert actual == 3 * (1 << 20) * _sum(values[:1])[0]


def test_power_of_two_is_exact():
    exponents = torch.tensor([-1022, -510, 0, 1, 52, 1023])
    assert power_of_two(exponents).tolist() == [math.ldexp(1.0, exponent) for exponent in exponents.tolist()]


def _addends(scale: float) -> torch.Tensor:
    """Makes `[m, 2]` of either sign, from 2^-31 of the largest to the largest, rounded to fp32."""
    generator = torch.Generator().manual_seed(5)
    magnitudes = torch.rand(4096, 2, generator=generator).mul(-31).exp2()
    signs = torch.randint(0, 2, (4096, 2), generator=generator) * 2 - 1
    return (magnitudes * signs * scale).double()


@pytest.mark.parametrize("scale", [1.0, 3e-20, 7e30])
def test_losses_are_rounded_once(scale: float):
    addends = _addends(scale)
    expected = [math.fsum(column) for column in addends.T.tolist()]
    orders = (torch.arange(4096), torch.arange(4096).flip(0), torch.randperm(4096))
    assert any(addends[order].cumsum(0)[-1].tolist() != expected for order in orders)  # which rounds every addition
    for order in orders:
        assert sum_in_any_order(addends[order]).tolist() == expected


def test_order_of_losses_does_not_show():
    addends = torch.cat([_addends(1.0), _addends(1e-12), _addends(1e-30)])
    actual = sum_in_any_order(addends)
    assert torch.equal(actual, sum_in_any_order(addends[torch.randperm(len(addends))]))
    for total, column in zip(actual.tolist(), addends.T.tolist(), strict=True):
        # Each addend is cut to a multiple of 2^-56 of the power of two above the largest, and the sum rounded.
        assert abs(total - math.fsum(column)) <= len(column) * 2.0**-57 + abs(total) * 2.0**-53


def test_non_finite_and_zero_losses():
    actual = sum_in_any_order(torch.tensor([[1.0, math.inf, 0.0], [math.nan, 1.0, 0.0]], dtype=torch.float64))
    assert math.isnan(actual[0]) and actual[1:].tolist() == [math.inf, 0.0]


def test_exact_statistics_are_those_of_reproducible_runs():
    kinds = [type(gradient_statistics([], ProcessGroupCollection(), is_exact=is_exact)) for is_exact in (False, True)]
    assert kinds == [GradientStatistics, ExactStatistics]
