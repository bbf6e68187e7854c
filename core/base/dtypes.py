"""Dtypes and their names: torch's, and short ones for configs."""

from __future__ import annotations

import torch

from .errors import ParallelConfigError
from .text import choices

Dtype = str | torch.dtype
"""A dtype, or its name."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
"""Dtypes that a file may have, by torch's names."""

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Dtypes that need fp32 masters."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Dtypes that a config may name, with their short names."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


_BY_NAME = {name: dtype for dtype, short in SHORT_NAMES.items() for name in (short, dtype_name(dtype))}
_BY_OLDER_NAME = {"half": torch.float16, "float": torch.float32, "double": torch.float64}


def as_dtype(name: str | torch.dtype | None, field: str = "dtype") -> torch.dtype | None:
    """Returns the floating-point dtype of a name such as ``"bf16"``, ``"bfloat16"`` or torch's older ``"half"``.

    Returns dtypes and None as they are.

    Raises:
        ParallelConfigError: the name is unknown, or the dtype is not floating point.
    """
    by_name = _BY_NAME | _BY_OLDER_NAME
    dtype = name if name is None or isinstance(name, torch.dtype) else by_name.get(str(name).removeprefix("torch."))
    if dtype in SHORT_NAMES or name is None:
        return dtype
    raise ParallelConfigError(f"{field} is {name!r}; {choices(str(name), _BY_NAME)}")
