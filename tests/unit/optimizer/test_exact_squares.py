"""The exact sum of squares: the same integer however elements are cut and ordered, and close to the true sum."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from core.optimizer.exact_squares import (
    digits_of,
    exponent_of_unit,
    largest_magnitude,
    root_of_digits,
    sum_of_squares,
)


def _norm(grads: list[torch.Tensor]) -> float:
    exponent = exponent_of_unit(largest_magnitude(grads))
    assert exponent is not None
    return root_of_digits(digits_of(sum_of_squares(grads, exponent)), exponent)


def _values(scale: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(200_003, generator=generator, dtype=torch.float64) * torch.randn(
        200_003, generator=generator, dtype=torch.float64
    )
    return (spread.pow(3) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 3e-30, 7e25])
def test_no_cut_and_no_order_changes_a_bit(scale: float, dtype: torch.dtype):
    values = _values(scale, dtype)
    expected = _norm([values])
    assert _norm(list(values.split(777))) == expected
    assert _norm([values[5:], values[:5]]) == expected
    assert (
        _norm([values[torch.randperm(len(values))].view(17, -1) if len(values) % 17 == 0 else values.flip(0)])
        == expected
    )


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_the_sum_is_the_true_one_to_the_stated_error(scale: float):
    values = _values(scale, torch.float32)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    exponent = exponent_of_unit(largest_magnitude([values]))
    error = abs(Fraction(sum_of_squares([values], exponent)) * Fraction(2) ** exponent - exact)
    assert error <= len(values) * Fraction(2) ** exponent / 2
    assert error / exact < 1e-9  # far below fp32's resolution, to which the norm is rounded


def test_values_that_are_not_finite_or_zero():
    assert largest_magnitude([torch.tensor([1.0, math.nan]), torch.ones(3)]) == math.inf
    assert largest_magnitude([torch.ones(3), torch.tensor([-math.inf])]) == math.inf
    assert exponent_of_unit(math.inf) is None and exponent_of_unit(1e300) is None
    assert _norm([torch.zeros(4)]) == 0.0
    assert _norm([torch.tensor([3.0, -4.0])]) == 5.0
