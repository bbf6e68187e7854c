"""Warnings that a user needs to see once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warns, the first time that it is given this message."""
    warnings.warn(message, stacklevel=3)
