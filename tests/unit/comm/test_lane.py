"""The lane runs tasks in order while the main thread runs, and hosts that wait for a device say what is late.

Events stand in for a GPU's.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import core.diagnostics  # noqa: F401  # which explains
from core.base import device
from core.base.errors import OutOfStepError
from core.comm import lane as lane_module
from core.comm import streams
from core.comm.lane import HostRead, comm_lane
from core.comm.record import record_of
from tests.unit._lane import called_before_waiting
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._ranks import fake_world
from tests.unit._spawn import JOB_LIMIT_S, on_ranks, reach, run_distributed, wait_for
from tests.unit.comm.test_record import Event, enqueue

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
    log = _Streams()
    with mock.patch.object(lane_module, "streams", log):
        lane = lane_module._StreamLane(torch.device("cuda", 1))
        handle = lane.submit(lambda: log.log.append(f"task on {log.current_stream().name}"))
        handle.wait()
    assert log.log == [
        "a stream on cuda:1 with priority -1",
        "lane waits for main",
        "task on lane",
        "event on lane",
        "main waits for the event",
    ]


def test_exit_waits_for_queued_tasks_but_not_for_stuck_ones():
    """Else a thread that comes out of one of torch's functions while Python ends is unwound through it: an abort."""
    program = """
import atexit, threading
import torch
from core.comm import lane

ends = threading.Event()

def multiply():
    ends.wait()
    [torch.ones(1000, 1000) @ torch.ones(1000, 1000) for _ in range(20)]
    print("multiplied", flush=True)

def wait_at_most(seconds):
    lane._LONGEST_EXIT_S = seconds

# What is registered last is called first.
lane.comm_lane(torch.device("cpu"), 0).submit(multiply)
atexit.register(wait_at_most, 600.0)
lane.comm_lane(torch.device("cpu"), 1).submit(threading.Event().wait)
atexit.register(wait_at_most, 0.1)
atexit.register(ends.set)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "multiplied\n", "")


def test_read_takes_values_at_construction() -> None:
    values = torch.tensor([1.0, 2.5], dtype=torch.float64)
    read = HostRead(values)
    values.zero_()
    assert read.wait() == read.wait() == [1.0, 2.5]


def _waits_for_a_rank_that_never_came() -> str:
    group = dist.new_group()
    record_of(group).limit_s = 0.5
    enqueue("the loss", Event(done=True), group)
    if dist.get_rank() == 1:
        enqueue("the gradient norm", Event(), group)
        reach("rank 1 waits for another")
        wait_for("rank 0 has its message")
        return ""
    wait_for("rank 1 waits for another")
    enqueue("the gradients of bucket a", Event(), group)
    enqueue("the gradient norm", Event(), group)
    try:
        with mock.patch.object(lane_module, "_LATE_CHECK_INTERVAL_S", 0.1), pytest.raises(OutOfStepError) as caught:
            lane_module.wait_for(Event())
    finally:
        reach("rank 0 has its message")
    return str(caught.value)


def test_waiting_device_is_explained_before_timeout() -> None:
    (message, _) = run_distributed(_waits_for_a_rank_that_never_came, 2)
    assert message.startswith("rank 0 of 2 waited ")
    assert "s for all-reduce 1 of the gradients of bucket a (4 B), its call 2 in this group" in message
    assert "rank 1 waited in all-reduce 1 of the gradient norm (4 B) instead, its call 2" in message
    assert "timed out waiting 450ms for the device to end all-reduce 2" in message  # of half a second less a tenth


class _Messages(io.StringIO):
    """A stream that lets a thread wait for a line about bucket a; others are of calls that earlier tests have left."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.has_line = "", threading.Event()

    def write(self, text: str) -> int:
        if "bucket a" in text:
            self.line = text
            self.has_line.set()
        return super().write(text)


def _is_stuck_in_the_driver() -> str:
    group = dist.new_group()
    record_of(group).limit_s = 0.5
    if dist.get_rank() == 1:
        wait_for("rank 0 has its message")
        return ""
    with mock.patch.object(sys, "stderr", _Messages()) as messages:
        enqueue("the gradients of bucket a", Event(), group)
        assert messages.has_line.wait(JOB_LIMIT_S / 6)
    reach("rank 0 has its message")
    return messages.line


def test_stuck_host_is_explained_on_stderr() -> None:
    (message, _) = run_distributed(_is_stuck_in_the_driver, 2)
    assert message.startswith("rank 0 of 2 waited ")
    assert "s for all-reduce 1 of the gradients of bucket a (4 B), its call 1 in this group" in message
    assert "rank 1 " in message and "timed out waiting 450ms" in message


def test_host_waits_without_late_collective() -> None:
    event = Event()
    with fake_world(rank=0, world_size=2), mock.patch.object(lane_module, "_LATE_CHECK_INTERVAL_S", 0.0):
        enqueue("the loss", Event())
        looks = iter(range(50))
        with mock.patch.object(event, "query", lambda: next(looks, None) is None):
            lane_module.wait_for(event)


def _late_and_then_over(numbers: torch.Tensor, delay: Callable[[], Any], arrive: Callable[[], Any]) -> str:
    """Returns what is said of a collective behind work that takes longer than the backend's limit, and ends."""
    record = record_of()
    dist.all_reduce(numbers)  # the first makes the backend's connections
    delay()
    with record.collective("all-reduce", "the loss", numbers.nbytes, on_device=True) as call:
        dist.all_reduce(numbers)
    behind = streams.record_event()
    assert not call.is_over and record.first_unfinished() is call
    late = (OutOfStepError, dist.DistBackendError)
    with (
        mock.patch.object(record, "limit_s", 0.5),
        mock.patch.object(lane_module, "_LATE_CHECK_INTERVAL_S", 0.1),
        pytest.raises(late) as caught,
    ):
        lane_module.wait_for(behind)
    assert record.first_unfinished() is None  # nothing is said twice
    arrive()
    assert call.is_over
    lane_module.wait_for(behind)
    assert HostRead(numbers).wait() == [1.0, 2.0]
    return str(caught.value)


@on_ranks(1)
def test_late_collective_behind_long_work_is_named() -> None:
    event = Event()
    with mock.patch.object(streams, "record_event", lambda: event):
        message = _late_and_then_over(torch.tensor([1.0, 2.0]), lambda: None, lambda: setattr(event, "done", True))
    assert re.search(r"timed out waiting 450ms for the device to end all-reduce \d+", message)


@pytest.mark.gpu
@needs_gpu
def test_late_collective_behind_gpu_work_is_named() -> None:
    cycles = int(20 * 2e9)  # twenty seconds, at two GHz: the host has until then to notice
    with one_rank_on_a_gpu():
        numbers = torch.tensor([1.0, 2.0], device=device.current_device())
        message = _late_and_then_over(numbers, lambda: torch.cuda._sleep(cycles), torch.cuda.synchronize)
    assert re.search(r"timed out waiting 450ms for the device to end all-reduce \d+", message)
