"""Lanes for tests: with something around each task, or with a call before a thread waits for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch

from core.comm.lane import LANES, CommLane, Handle, Task, new_lane

Submit = Callable[[CommLane, Callable[[], None]], Handle]


class _SubmittingLane(CommLane):
    def __init__(self, lane: CommLane, submit: Submit) -> None:
        self._lane, self._submit = lane, submit

    def submit(self, run: Callable[[], None]) -> Handle:
        return self._submit(self._lane, run)


def lanes_that(submit: Submit) -> AbstractContextManager[None]:
    """Gives what is wrapped inside it lanes that submit each task by `submit(lane, run)`, with a usual lane."""
    return LANES.replaced(functools.cache(lambda *place: _SubmittingLane(new_lane(*place), submit)))


def run_at_once(lane: CommLane, run: Callable[[], None]) -> Handle:
    """Submits nothing and runs the task: when a lane's thread frees memory depends on the machine's load."""
    task = Task(run)
    with torch.no_grad():
        task.execute()
    return task


@contextmanager
def called_before_waiting(call: Callable[[Task], object]) -> Iterator[None]:
    """Calls a function with each task of a lane that a thread waits for, on that thread and right before it waits.

    What a test holds back goes on then and no earlier.
    """
    wait = Task.wait

    def call_and_wait(task: Task) -> None:
        call(task)
        wait(task)

    with mock.patch.object(Task, "wait", call_and_wait):
        yield
