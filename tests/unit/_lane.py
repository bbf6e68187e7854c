"""Tells a test when a thread waits for a lane, so that what it holds back goes on then and no earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from core.comm import lane


@contextmanager
def called_before_waiting(call: Callable[[Any], object]) -> Iterator[None]:
    """Calls a function with each task of a lane that a thread waits for, on that thread and right before it waits."""
    wait = lane._Task.wait

    def call_and_wait(task: lane._Task) -> None:
        call(task)
        wait(task)

    with mock.patch.object(lane._Task, "wait", call_and_wait):
        yield
