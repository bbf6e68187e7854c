"""The comparison of sums: another order passes, on any processor, and a number that is wrong does not."""

import pytest
import torch

from tests.unit._rounding import assert_same_sums


def test_another_order_passes_and_a_lost_addend_does_not():
    addends = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    addends[5, :100] = -addends[:5, :100].sum(0)  # what is left of these is rounding alone
    forth, back = addends[0], addends[5]
    for index in range(1, 6):
        forth, back = forth + addends[index], back + addends[5 - index]
    assert not torch.allclose(forth, back, rtol=1e-6, atol=1e-8)
    assert_same_sums({"sum": forth}, {"sum": back}, additions=5)
    with pytest.raises(AssertionError, match="sum is off by"):
        assert_same_sums({"sum": forth - 1e-4 * addends[0]}, {"sum": back}, additions=5)
