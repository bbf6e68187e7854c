"""Dtypes are known by their names."""

from __future__ import annotations

import pytest
import torch

from core.base.dtypes import as_dtype
from core.base.errors import ParallelConfigError


def test_dtypes_have_their_short_and_their_long_names():
    assert [as_dtype(name) for name in ("bf16", "bfloat16", "torch.float16", "fp32")] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    assert as_dtype(torch.bfloat16) is torch.bfloat16 and as_dtype(None) is None
    assert as_dtype("half") is torch.float16 and as_dtype("torch.double") is torch.float64
    for wrong in ("int8", torch.int64, "halves"):
        with pytest.raises(ParallelConfigError, match=f"reduce_dtype is .*{wrong}.*fp32, float32, bf16"):
            as_dtype(wrong, "reduce_dtype")
