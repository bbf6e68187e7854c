"""Runs collectives while the rank computes, one after the other in the order of submission.

On CUDA the lane is a stream. Elsewhere it is a thread that waits for the network and adds what arrives, without the
interpreter's lock, while the main thread computes.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable

import torch

from . import streams


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
    return _lane(device, number)


def wait_for_lanes() -> None:
    """Waits until the threads of this process's lanes are idle, whether their tasks failed or not."""
    for lane in _threads:
        lane.wait_until_idle()


_threads: list[_ThreadLane] = []
"""The lanes that are threads, in the order of their creation. `_ThreadLane` adds itself."""


# Never cleared: there is one lane for each device and number, and its thread or stream lives as long as the process.
@functools.cache
def _lane(device: torch.device, number: int) -> CommLane:
    return _StreamLane(device) if streams.is_asynchronous(device) else _ThreadLane()


class _Task(Handle):
    def __init__(self, run: Callable[[], None]) -> None:
        # The lane's thread drops it, with the buffers that it refers to, once it has run.
        self._run: Callable[[], None] | None = run
        # The lane's thread sets it once, after all other fields. Any thread may wait for it.
        self._ended = threading.Event()
        # The exception that `run` raised, if any. The lane's thread sets it; valid once `_ended` is set.
        self._error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def has_ended_within(self, seconds: float | None) -> bool:
        return self._ended.wait(seconds)

    def execute(self) -> None:
        try:
            if self._run is not None:
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._run = None
            self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class _ThreadLane(CommLane):
    def __init__(self) -> None:
        # Tasks that have not begun. `submit` adds them, on any thread; the lane's thread removes them.
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        # None until the first `submit` starts it. It ends with the process.
        self._thread: threading.Thread | None = None
        # The last task submitted, or None. `submit` sets it. The lane is idle once this task has ended.
        self._last: _Task | None = None
        _threads.append(self)

    def wait_until_idle(self) -> None:
        if self._last is not None:
            self._last.has_ended_within(None)

    def submit(self, run: Callable[[], None]) -> Handle:
        if self._thread is None:
            # A daemon: a process that exits must not wait for messages of a rank that is gone.
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="comm-lane", daemon=True)
            self._thread.start()
            atexit.register(self._wait_at_exit)
        task = self._last = _Task(run)
        self._tasks.put(task)
        return task

    def run(self, run: Callable[[], None]) -> None:
        if self._last is None or self._last.has_ended:
            run()  # the lane is idle: on this thread it costs no thread switches
        else:
            super().run(run)

    def _wait_at_exit(self) -> None:
        """Runs at exit: waits briefly for the last task, because a thread inside torch aborts the process."""
        if self._last is not None:
            self._last.has_ended_within(_LONGEST_EXIT_S)


_LONGEST_EXIT_S = 5.0
"""Seconds that a process waits at exit for the last task."""


def _serve(tasks: queue.SimpleQueue[_Task]) -> None:
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
        task, submitter = _Task(run), streams.current_stream()
        self._stream.wait_stream(submitter)
        with streams.stream(self._stream):
            task.execute()
            return _Recorded(task, run, submitter, streams.record_event())


class _Recorded(Handle):
    def __init__(self, task: _Task, run: Callable[[], None], submitter: streams.Stream, event: streams.Event) -> None:
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
