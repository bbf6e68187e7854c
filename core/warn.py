"""Warnings that a user needs to see once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Warns, the first time that it is given this message; `stacklevel` as `warnings.warn` takes it."""
    warnings.warn(message, stacklevel=stacklevel)
