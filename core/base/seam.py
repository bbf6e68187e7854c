"""A value of the process that a simulation changes for a while: the planner, and the tests' simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Seam(Generic[T]):
    """One value for all threads. Code reads `value` where it needs it, and `replaced` is the only way to change it."""

    def __init__(self, value: T) -> None:
        # `replaced` sets and restores it, on one thread. Every thread reads it.
        self.value = value

    @contextmanager
    def replaced(self, value: T) -> Iterator[None]:
        """Puts another value in its place inside the ``with`` block, for all threads."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
