"""Dtypes by the names that configs give them."""

from __future__ import annotations

import torch

from .errors import ParallelConfigError

Dtype = str | torch.dtype
"""A dtype, or its name."""

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}
DTYPE_NAMES = tuple(_DTYPES)
"""The names that `as_dtype` knows."""


def as_dtype(name: str | torch.dtype | None, field: str = "dtype") -> torch.dtype | None:
    """The floating-point dtype of this name, as ``"bf16"`` or ``"bfloat16"``; a dtype and None are given back.

    Raises:
        ParallelConfigError: no such name, or a dtype of integers.
    """
    found = name if name is None or isinstance(name, torch.dtype) else _DTYPES.get(name.removeprefix("torch."))
    if found in _DTYPES.values() or name is None:
        return found
    raise ParallelConfigError(f"{field} is {name!r}; it takes one of {', '.join(_DTYPES)}")
