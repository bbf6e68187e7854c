"""Does not stall the rank: runs collectives in a lane while it computes, and reads numbers from the device.

A lane runs collectives one after the other, in the order of submission. On CUDA it is a stream. Elsewhere it is a
thread that waits for the network and adds what arrives, without the interpreter's lock, while the main thread
computes.

A host that reads a result of the device (``item``, ``tolist``, ``bool``) waits until the device has done all that is
queued, and queues nothing meanwhile. A `HostRead` waits only for what was queued before it was made, and a step later
not at all. If a collective before it does not end, because a rank did not join it, the wait raises before the
backend's time limit, which would end the process, and the error names the collective.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base.device import Seam
from ..base.errors import OutOfStepError
from . import streams
from .record import is_recording, raise_if_late


class Handle:
    """A task in the lane. After `wait` the main thread may use its result."""

    def wait(self) -> None:
        """Waits for the task and re-raises its exception, if any."""
        raise NotImplementedError


class CommLane:
    """Runs tasks in order and asynchronously. All ranks must submit the same sequence."""

    def submit(self, run: Callable[[], None]) -> Handle:
        """Queues `run`, and keeps its closure alive until it has run, on CUDA until its handle is waited for."""
        raise NotImplementedError

    def run(self, run: Callable[[], None]) -> None:
        """Runs `run` after every task in the lane, and returns when its result may be used."""
        self.submit(run).wait()


def comm_lane(device: torch.device, number: int = 0) -> CommLane:
    """Returns a lane of a device, the same at each call with this number, for the process's life.

    Two lanes take different process groups, in which messages cannot overtake each other's.
    """
    return LANES.value(device, number)


def wait_for_lanes() -> None:
    """Waits until the threads of this process's lanes are idle, whether their tasks failed or not."""
    for lane in _threads:
        lane.wait_until_idle()


_threads: list[_ThreadLane] = []
"""The lanes that are threads, in the order of their creation. `_ThreadLane` adds itself."""


def new_lane(device: torch.device, number: int = 0) -> CommLane:
    """Makes a lane that belongs to the caller alone."""
    return _StreamLane(device) if streams.is_asynchronous(device) else _ThreadLane()


LANES: Seam[Callable[[torch.device, int], CommLane]] = Seam(functools.cache(new_lane))
"""Returns the lane of a device and number. The cache is never cleared: a lane's thread or stream lives as long as the
process. The planner's lane runs tasks at once, and tests have lanes that run them late."""


class Task(Handle):
    """A task that runs on the host: whether it has ended, and its exception."""

    def __init__(self, run: Callable[[], None]) -> None:
        # The lane's thread drops it, with the buffers that it refers to, once it has run.
        self._run: Callable[[], None] | None = run
        # The lane's thread sets it once, after all other fields. Any thread may wait for it.
        self._end_event = threading.Event()
        # The exception that `run` raised, if any. The lane's thread sets it; valid once `_end_event` is set.
        self._error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self._end_event.is_set()

    def has_ended_within(self, seconds: float | None) -> bool:
        return self._end_event.wait(seconds)

    def execute(self) -> None:
        try:
            if self._run is not None:
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._run = None
            self._end_event.set()

    def wait(self) -> None:
        self._end_event.wait()
        if self._error is not None:
            raise self._error


class _ThreadLane(CommLane):
    def __init__(self) -> None:
        # Tasks that have not begun. `submit` adds them, on any thread; the lane's thread removes them.
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        # None until the first `submit` starts it. It ends with the process.
        self._thread: threading.Thread | None = None
        # The last task submitted, or None. `submit` sets it. The lane is idle once this task has ended.
        self._last: Task | None = None
        _threads.append(self)

    def wait_until_idle(self, most_s: float | None = None) -> None:
        if self._last is not None:
            self._last.has_ended_within(most_s)

    def submit(self, run: Callable[[], None]) -> Handle:
        if self._thread is None:
            # A daemon: a process that exits must not wait for messages of a rank that is gone.
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="comm-lane", daemon=True)
            self._thread.start()
            # At exit too, briefly: a thread inside torch would abort the process.
            atexit.register(self.wait_until_idle, _LONGEST_EXIT_S)
        task = self._last = Task(run)
        self._tasks.put(task)
        return task

    def run(self, run: Callable[[], None]) -> None:
        if self._last is None or self._last.has_ended:
            run()  # the lane is idle: on this thread it costs no thread switches
        else:
            super().run(run)


_LONGEST_EXIT_S = 5.0
"""Seconds that a process waits at exit for the last task."""


def _serve(tasks: queue.SimpleQueue[Task]) -> None:
    with torch.no_grad():
        while True:
            task = tasks.get()
            task.execute()
            del task  # else the last task and its error would live until the next one


class _StreamLane(CommLane):
    def __init__(self, device: torch.device) -> None:
        # Its priority is high, as of FSDP2's streams: of a collective and a computation that could both start, the
        # collective does, so that its result is waited for less.
        self._stream = streams.Stream(device, priority=-1)

    def submit(self, run: Callable[[], None]) -> Handle:
        task, submitter = Task(run), streams.current_stream()
        self._stream.wait_stream(submitter)
        with streams.stream(self._stream):
            task.execute()
            return _Recorded(task, run, submitter, streams.record_event())


class _Recorded(Handle):
    def __init__(self, task: Task, run: Callable[[], None], submitter: streams.Stream, event: streams.Event) -> None:
        # Keeps the task's buffers alive, because the lane's stream may still read them, even if the task raised.
        # `wait` drops it.
        self._run: Callable[[], None] | None = run
        # The stream that submitted the task. It waits too: callers wait once, and forget the handle for all streams.
        self._submitter = submitter
        # Fixed. The task has run on the host; the event is at its end on the lane's stream.
        self._task, self._event = task, event

    def wait(self) -> None:
        for stream in {self._submitter, streams.current_stream()}:
            stream.wait_event(self._event)
        self._run = None
        self._task.wait()


# ---- numbers of the device, read on the host

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 1e-3
_LATE_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks for a collective that takes too long."""


class HostRead:
    """Numbers that are being copied to the host.

    Args:
        values: `[n]`, on any device; may change as soon as the constructor returns.
    """

    def __init__(self, values: Tensor) -> None:
        # Event at the end of the copy on the device's current stream; `wait` clears it. None if `_numbers` are valid.
        self._event: streams.Event | None = None
        if streams.is_asynchronous(values.device):
            # Pinned memory owned by this read, which the device writes until `_event`; the host reads it after.
            self._numbers = streams.pinned(values.shape, values.dtype)
            self._numbers.copy_(values, non_blocking=True)
            self._event = streams.record_event()
        else:
            self._numbers = values.clone()

    def wait(self) -> list[float]:
        """Returns the numbers, once they are there. May be called again.

        Raises:
            OutOfStepError: a collective queued before the copy did not end, because not all ranks joined it.
        """
        if self._event is not None:
            wait_for(self._event)
            self._event = None
        return _to_list(self._numbers)


def known_on_host(value: Tensor) -> float | None:
    """Returns a 0-dim tensor's number where the host has it, or None where it would have to wait for a device."""
    return _to_list(value.view(1))[0] if not streams.is_asynchronous(value.device) else None


def read_now(values: Tensor) -> list[Any]:
    """Returns a tensor's numbers. The host waits for all that is queued on the device: results give a size."""
    return _to_list(values)


groups_are_aborted = threading.Event()
"""Set while the groups of this process are of no use, as those with a lost rank: what the device had queued on them
has ended without a result. `shardstack.training.launch.generations` sets and clears it, on any thread."""


def wait_for(event: streams.Event) -> None:
    """Waits on the host for a point in the device's work.

    Raises:
        OutOfStepError: a collective queued before that point did not end, because not all ranks joined it, or ended
            without a result, because its group was aborted.
    """
    while not wait_until(event.query, _LATE_CHECK_INTERVAL_S) and not groups_are_aborted.is_set():
        if is_recording():
            raise_if_late()
    if groups_are_aborted.is_set():
        raise OutOfStepError("the process groups were aborted; what the device had queued has no result")


def wait_until(is_over: Callable[[], bool], limit_s: float) -> bool:
    """Asks on the host until something is over, and returns whether it was within the limit."""
    pause, end = _SHORTEST_PAUSE_S, time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def _to_list(numbers: Tensor) -> list[float]:
    """Reads numbers on the host, for all code of a step. `tests/unit/training/test_host_reads.py` counts the calls."""
    values: list[float] = numbers.tolist()
    return values
