"""Copies into host memory: of tensors on the host too, in any layout. Streams are in tests/streams."""

from __future__ import annotations

import torch

from core.comm.background_copies import BackgroundCopies


def test_tensors_of_any_layout_and_dtype_are_copied():
    values = [torch.randn(3, 4).t(), torch.arange(5), torch.ones(2, dtype=torch.bfloat16), torch.empty(0)]
    targets = [torch.zeros(value.shape, dtype=value.dtype) for value in values]
    copies = BackgroundCopies()
    after = copies.begin(values)
    assert after is None
    copies.copy(targets, values, after)
    assert all(map(torch.equal, targets, values))
