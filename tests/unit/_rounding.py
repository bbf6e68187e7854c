"""Tensors of the same names compared: bit by bit, or as two sums of the same numbers in another order."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raises AssertionError unless both have the same names, and the same bits under each."""
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"differ: {wrong}"


def assert_same_sums(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], additions: int) -> None:
    """Raises AssertionError unless all elements are the expected ones but for the rounding of so many additions.

    An addition is off by at most half a unit in the last place of its result, in each of the two orders: together by
    `additions` times the dtype's epsilon times the largest result on the way. The largest element of all tensors is
    taken for it: not the element itself, nor its tensor, which may have one element, because what they add may cancel.
    Without additions all must be equal.
    """
    assert found.keys() == expected.keys()
    largest = max((value.abs().max().item() for value in expected.values()), default=0.0)
    for name, value in expected.items():
        limit = additions * torch.finfo(value.dtype).eps * largest
        off = (found[name] - value).abs().max().item()
        assert off <= limit, f"{name} is off by {off:.1e}, and {additions} additions may be off by {limit:.1e}"
