"""A lane that runs a task as late as it may: when something waits for it. A missing wait then reads old numbers."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from core.comm.lane import LANES, CommLane, Handle, Task


class _LateLane(CommLane):
    """Keeps tasks until one is waited for, and then runs it and all before it, on the thread that waits."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()  # that have not run, in order
        self.submitted = 0

    def submit(self, run: Callable[[], None]) -> Handle:
        task = _LateTask(run, self)
        self.tasks.append(task)
        self.submitted += 1
        return task

    def run_up_to(self, task: Task | None) -> None:
        """Runs tasks up to and with this one; None runs all."""
        while self.tasks and (task is None or not task.has_ended):
            with torch.no_grad():
                self.tasks.popleft().execute()


class _LateTask(Task):
    def __init__(self, run: Callable[[], None], late: _LateLane) -> None:
        super().__init__(run)
        self._late = late

    def wait(self) -> None:
        self._late.run_up_to(self)
        super().wait()


@contextmanager
def late_lanes() -> Iterator[list[_LateLane]]:
    """Puts late lanes in the place of a CPU's, which what is wrapped inside takes; at the end runs what is left."""
    lanes: list[_LateLane] = []

    @functools.cache
    def made(device: torch.device, number: int) -> _LateLane:
        lanes.append(_LateLane())
        return lanes[-1]

    with LANES.replaced(made):
        yield lanes
        for late in lanes:
            late.run_up_to(None)
