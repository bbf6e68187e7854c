"""Puts simulated streams in the place of a GPU's: in `core.comm.streams`, in FSDP2, and between threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from core.comm import lane, streams
from tests.streams.recorder import HOST, IN_PLACE, IN_TWO, Devices, Recorder, collective
from tests.streams.simulation import Event, Simulation, Stream


@contextmanager
def simulated_streams() -> Iterator[Simulation]:
    """Makes every operation of this process, until the end, one of a simulated GPU. It changes the whole process."""
    simulation = Simulation()
    with ExitStack() as stack:
        for owner, values in (
            (streams, _seam(simulation)),
            (lane, {"wait_for": lambda event: event.synchronize()}),  # which polls
            (torch.cpu, _names_of_both(simulation)),  # where FSDP2 takes them from
            (torch.accelerator, {"current_stream": lambda device=None: simulation.current}),
            (ProcessGroup, _collectives(simulation)),
            (threading.Thread, _threads(simulation)),
            (threading.Event, _events(simulation)),
            (ThreadPoolExecutor, {"submit": _submit(simulation, ThreadPoolExecutor.submit)}),
            (Future, {"result": _joined_after(simulation, Future.result)}),
            (Tensor, {"pin_memory": lambda tensor: tensor}),  # which FSDP2 calls; its offload is not simulated
            (Tensor, {name: _read_by_host(simulation, getattr(Tensor, name)) for name in ("tolist", "numpy")}),
        ):
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(lane.LANES.replaced(functools.cache(lane.new_lane)))  # of this simulation
        stack.enter_context(Recorder(simulation))
        stack.enter_context(Devices(simulation))
        yield simulation


def _seam(simulation: Simulation) -> dict[str, Any]:
    def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=HOST)
        simulation.memory(made).is_pinned = True
        return made

    return _names_of_both(simulation) | {
        "synchronize": simulation.synchronize,
        "is_asynchronous": lambda device: device != HOST,
        "is_current_stream_capturing": lambda: False,
        "pinned": pinned,
        "used_on": simulation.used_on,
    }


def _names_of_both(simulation: Simulation) -> dict[str, Any]:
    return {
        "Stream": lambda *args, **kwargs: Stream(simulation),
        "Event": lambda *args, **kwargs: Event(simulation),
        "stream": simulation.on,
        "current_stream": lambda device=None: simulation.current,
    }


def _collectives(simulation: Simulation) -> dict[str, Any]:
    """Returns the methods of process groups; the fake backend has no options, which hold a limit."""
    found = {
        name: collective(simulation, name, getattr(ProcessGroup, name))
        for name in (*IN_TWO, *IN_PLACE)
        if hasattr(ProcessGroup, name)
    }
    backend = SimpleNamespace(
        options=SimpleNamespace(_timeout=timedelta(minutes=30)), supports_tensor_alloc=lambda device: False
    )
    return found | {"_get_backend": lambda group, device: backend}


def _threads(simulation: Simulation) -> dict[str, Any]:
    """Threads begin after what started them, record too, and come before what joins them."""
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def begin(thread: Any) -> None:
        thread._simulated_clock = dict(simulation.clock(simulation.host))
        start(thread)

    def run_recorded(thread: Any) -> None:
        with Recorder(simulation), Devices(simulation):
            simulation.join(simulation.host, thread._simulated_clock)
            run(thread)
            thread._simulated_clock = dict(simulation.clock(simulation.host))

    def join_line(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            simulation.join(simulation.host, getattr(thread, "_simulated_clock", {}))

    return {"start": begin, "run": run_recorded, "join": join_line}


def _events(simulation: Simulation) -> dict[str, Any]:
    """A thread that has waited for an event comes after the one that has set it."""
    really_set = threading.Event.set

    def note_and_set(event: Any) -> None:
        event._simulated_clock = dict(simulation.clock(simulation.host))
        really_set(event)

    return {"set": note_and_set, "wait": _joined_after(simulation, threading.Event.wait)}


def _joined_after(simulation: Simulation, wait: Any) -> Any:
    def wait_and_join(self: Any, timeout: float | None = None) -> Any:
        result = wait(self, timeout)
        simulation.join(simulation.host, getattr(self, "_simulated_clock", {}))
        return result

    return wait_and_join


def _submit(simulation: Simulation, submit: Any) -> Any:
    def submit_in_order(executor: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, after = dict(simulation.clock(simulation.host)), dict[str, int]()

        def run(*args: Any, **kwargs: Any) -> Any:
            simulation.join(simulation.host, before)
            try:
                return function(*args, **kwargs)
            finally:
                after.update(simulation.clock(simulation.host))

        future = submit(executor, run, *args, **kwargs)
        future._simulated_clock = after
        return future

    return submit_in_order


def _read_by_host(simulation: Simulation, read: Any) -> Any:
    """A read of numbers by the host waits for the current stream, unless they are in its memory."""

    def wait_and_read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and type(tensor) is Tensor:
            simulation.operation("a read by the host", [tensor.detach()], [], blocks=True)
        return read(tensor, *args, **kwargs)

    return wait_and_read
