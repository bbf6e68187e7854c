"""The lane runs tasks in order while the main thread runs, and keeps nothing alive longer than needed."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from core.comm import lane as lane_module
from core.comm.lane import comm_lane
from tests.unit._lane import called_before_waiting

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).resolve().parents[3]


def test_tasks_run_in_order_while_the_main_thread_runs():
    lane, done, gate = comm_lane(CPU), [], threading.Event()
    first = lane.submit(lambda: (gate.wait(), done.append(threading.current_thread())))
    second = lane.submit(lambda: done.append("second"))
    assert not done
    gate.set()
    second.wait()
    first.wait()
    assert done[1] == "second" and done[0] is not threading.main_thread()


def test_wait_raises_task_error():
    lane = comm_lane(CPU)
    failing = lane.submit(lambda: 1 / 0)
    lane.submit(lambda: None).wait()
    with pytest.raises(ZeroDivisionError):
        failing.wait()


def test_buffer_is_freed_after_its_task():
    lane = comm_lane(CPU)
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    handle = lane.submit(tensor.zero_)
    del tensor
    handle.wait()
    lane.submit(lambda: None).wait()
    assert seen() is None


def test_immediate_call_runs_after_queued_tasks():
    lane, done, gate = comm_lane(CPU), [], threading.Event()
    lane.submit(lambda: (gate.wait(), done.append("first")))
    with called_before_waiting(lambda task: gate.set()):
        lane.run(lambda: done.append("second"))
    gate.set()  # if nothing has waited
    assert done == ["first", "second"]
    assert comm_lane(torch.device("cpu")) is comm_lane(CPU, 0) is lane


class _Streams:
    """Stands in for `core.comm.streams` and logs each call with its stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current, self._streams = "main", {"main": mock.Mock(), "lane": mock.Mock()}
        for name, stream in self._streams.items():
            stream.name = name  # `Mock(name=...)` is another name

    def Stream(self, device: torch.device, priority: int = 0) -> SimpleNamespace:
        self.log.append(f"a stream on {device} with priority {priority}")
        return SimpleNamespace(name="lane", wait_stream=lambda other: self.log.append(f"lane waits for {other.name}"))

    def current_stream(self) -> mock.Mock:
        stream = self._streams[self._current]
        stream.wait_event = lambda event: self.log.append(f"{self._current} waits for the event")
        return stream

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self._current = stream.name
        yield
        self._current = "main"

    def record_event(self) -> None:
        self.log.append(f"event on {self._current}")


def test_gpu_lane_is_a_high_priority_stream():
    streams = _Streams()
    with mock.patch.object(lane_module, "streams", streams):
        lane = lane_module._StreamLane(torch.device("cuda", 1))
        handle = lane.submit(lambda: streams.log.append(f"task on {streams.current_stream().name}"))
        handle.wait()
    assert streams.log == [
        "a stream on cuda:1 with priority -1",
        "lane waits for main",
        "task on lane",
        "event on lane",
        "main waits for the event",
    ]


def _ends_with_something_in_the_lane(longest_exit_s: float, task: str) -> tuple[int, str, str]:
    """Runs a program whose lane begins a task, statements of Python, when the program ends."""
    program = f"""
import atexit, threading
import torch
from core.comm import lane

lane._LONGEST_EXIT_S = {longest_exit_s}
ends = threading.Event()

def task():
    ends.wait()
    {task}

lane.comm_lane(torch.device("cpu")).submit(task)
atexit.register(ends.set)  # called before what the lane has registered
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_exit_waits_for_queued_tasks():
    """Else a thread that comes out of one of torch's functions while Python ends is unwound through it: an abort."""
    products = "[torch.ones(1000, 1000) @ torch.ones(1000, 1000) for _ in range(20)]; print('multiplied', flush=True)"
    assert _ends_with_something_in_the_lane(600.0, products) == (0, "multiplied\n", "")


def test_exit_does_not_wait_for_stuck_task():
    assert _ends_with_something_in_the_lane(0.1, "threading.Event().wait()") == (0, "", "")
