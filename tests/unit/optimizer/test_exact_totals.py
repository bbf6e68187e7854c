"""Sums of losses in any order, compared with `math.fsum`."""

import math

import pytest
import torch

from core.optimizer.exact_sums import sum_in_any_order


def _addends(scale: float) -> torch.Tensor:
    """Makes `[m, 2]` of either sign, from 2^-31 of the largest to the largest, rounded to fp32."""
    generator = torch.Generator().manual_seed(5)
    magnitudes = torch.rand(4096, 2, generator=generator).mul(-31).exp2()
    signs = torch.randint(0, 2, (4096, 2), generator=generator) * 2 - 1
    return (magnitudes * signs * scale).double()


@pytest.mark.parametrize("scale", [1.0, 3e-20, 7e30])
def test_they_are_rounded_once(scale: float):
    addends = _addends(scale)
    expected = [math.fsum(column) for column in addends.T.tolist()]
    orders = (torch.arange(4096), torch.arange(4096).flip(0), torch.randperm(4096))
    assert any(addends[order].cumsum(0)[-1].tolist() != expected for order in orders)  # which rounds every addition
    for order in orders:
        assert sum_in_any_order(addends[order]).tolist() == expected


def test_an_order_does_not_show_where_last_bits_are_cut():
    addends = torch.cat([_addends(1.0), _addends(1e-12), _addends(1e-30)])
    actual = sum_in_any_order(addends)
    assert torch.equal(actual, sum_in_any_order(addends[torch.randperm(len(addends))]))
    for total, column in zip(actual.tolist(), addends.T.tolist(), strict=True):
        # Each addend is cut to a multiple of 2^-56 of the power of two above the largest, and the sum rounded.
        assert abs(total - math.fsum(column)) <= len(column) * 2.0**-57 + abs(total) * 2.0**-53


def test_non_finite_and_zero_addends():
    actual = sum_in_any_order(torch.tensor([[1.0, math.inf, 0.0], [math.nan, 1.0, 0.0]], dtype=torch.float64))
    assert math.isnan(actual[0]) and actual[1:].tolist() == [math.inf, 0.0]
