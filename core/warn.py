"""Warns once per message."""

from __future__ import annotations

import functools
import warnings


# Remembers every message as long as the process lives; tests call `warn_once.cache_clear()`.
@functools.cache
def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Warns at the first call with this message; `stacklevel` is that of `warnings.warn`."""
    warnings.warn(message, stacklevel=stacklevel)
