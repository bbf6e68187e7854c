"""The simulation finds the races of programs of a few lines, and accepts orders that are right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from core.comm import streams
from core.comm.collectives import all_reduce_by_backend
from core.comm.lane import HostRead, comm_lane
from tests.streams.process import simulate

CPU = torch.device("cpu")
RACES: list[Callable[[], None]] = []
ORDERS: list[Callable[[], None]] = []


def _race(program: Callable[[], None]) -> Callable[[], None]:
    RACES.append(program)
    return program


def _order(program: Callable[[], None]) -> Callable[[], None]:
    ORDERS.append(program)
    return program


@contextmanager
def _forked() -> Iterator[streams.Stream]:
    """Makes a new stream the current one, which waits for the one before."""
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        yield side


@_race
def _writes_what_another_stream_reads() -> None:
    x, side = torch.ones(4), streams.Stream()
    with streams.stream(side):
        x.sum()


@_race
def _reads_what_another_stream_writes() -> None:
    x = torch.ones(4)
    with _forked():
        x.zero_()
    x.sum()


@_race
def _waits_for_an_event_before_the_write() -> None:
    x = torch.ones(4)
    with _forked():
        event = streams.record_event()
        x.zero_()
    streams.current_stream().wait_event(event)
    x.sum()


@_race
def _another_stream_waits_for_the_event() -> None:
    x, third = torch.ones(4), streams.Stream()
    with _forked():
        x.zero_()
        event = streams.record_event()
    third.wait_event(event)
    x.sum()


@_race
def _parts_that_overlap() -> None:
    x = torch.ones(8)
    with _forked():
        x[:5].zero_()
    x[4:].sum()


@_order
def _parts_that_do_not_overlap() -> None:
    x = torch.ones(8)
    with _forked():
        x[:4].zero_()
    x[4:].zero_()


@_order
def _both_only_read() -> None:
    x = torch.ones(4)
    with _forked():
        x.sum()
    x.mean()


@_order
def _waits_reach_over_a_third_stream() -> None:
    x, third = torch.ones(4), streams.Stream()
    with _forked() as side:
        x.zero_()
    third.wait_stream(side)
    streams.current_stream().wait_stream(third)
    x.sum()


@_race
def _memory_is_freed_while_another_stream_reads_it() -> None:
    x = torch.ones(4)
    with _forked():
        x.sum()
    del x
    torch.empty(2)


@_order
def _memory_is_freed_after_the_home_stream_has_waited() -> None:
    x = torch.ones(4)
    with _forked() as side:
        x.sum()
    del x
    streams.current_stream().wait_stream(side)
    torch.empty(2)


@_order
def _memory_is_freed_with_its_use_recorded() -> None:
    x = torch.ones(4)
    with _forked() as side:
        x.sum()
    streams.used_on(x, side)
    del x
    torch.empty(2)


@_race
def _memory_belongs_to_the_stream_that_allocates_it() -> None:
    side = streams.Stream()
    with streams.stream(side):
        x = torch.empty(4)  # written by main alone, and given away by the side stream
    x.zero_()
    del x
    with streams.stream(side):
        torch.empty(4)


@_race
def _a_collective_writes_its_output() -> None:
    whole, part = torch.zeros(4), torch.ones(2)
    with _forked():
        dist.all_gather_into_tensor(whole, part)
    whole.sum()


@_order
def _a_collective_only_reads_its_input() -> None:
    whole, part = torch.zeros(4), torch.ones(2)
    with _forked():
        dist.all_gather_into_tensor(whole, part)
    part.sum()


@_race
def _an_asynchronous_collective_is_not_waited_for() -> None:
    x = torch.ones(4)
    work = all_reduce_by_backend(x, what="the loss", async_op=True)
    x.sum()
    assert work is not None
    work.wait()


@_order
def _an_asynchronous_collective_is_waited_for() -> None:
    x = torch.ones(4)
    work = all_reduce_by_backend(x, what="the loss", async_op=True)
    assert work is not None
    work.wait()
    x.sum()


@_race
def _a_lane_is_not_waited_for() -> None:
    x = torch.ones(4)
    handle = comm_lane(CPU).submit(x.zero_)
    x.sum()
    handle.wait()


@_order
def _a_lane_is_waited_for() -> None:
    x = torch.ones(4)
    comm_lane(CPU).submit(x.zero_).wait()
    x.sum()


@_race
def _the_host_reads_before_a_copy_has_ended() -> None:
    numbers = streams.pinned([4], torch.float32)
    numbers.copy_(torch.ones(4), non_blocking=True)
    numbers.tolist()


@_race
def _the_host_writes_what_a_copy_reads() -> None:
    numbers = streams.pinned([4], torch.float32)
    torch.ones(4).copy_(numbers, non_blocking=True)
    numbers.zero_()


@_order
def _the_host_waits_for_a_copy() -> None:
    numbers = streams.pinned([4], torch.float32)
    numbers.copy_(torch.ones(4), non_blocking=True)
    streams.record_event().synchronize()
    numbers.tolist()
    numbers.copy_(torch.ones(4))  # blocks
    numbers.zero_()


@_order
def _the_host_reads_numbers_as_a_step_does() -> None:
    assert HostRead(torch.ones(2)).wait() == [1.0, 1.0]


@_order
def _what_the_host_has_waited_for_is_over_on_every_stream() -> None:
    x, third = torch.ones(4), streams.Stream()
    with _forked():
        x.zero_()
        x.sum().item()
    with streams.stream(third):
        x.sum()


def _fill(numbers: torch.Tensor) -> int:
    numbers.copy_(torch.ones(4), non_blocking=True)
    streams.record_event().synchronize()
    return 1


@_race
def _a_thread_is_not_waited_for() -> None:
    numbers = streams.pinned([4], torch.float32)
    thread = threading.Thread(target=_fill, args=(numbers,))
    thread.start()
    while thread.is_alive():
        pass  # no order: the host has been lucky
    numbers.tolist()


@_order
def _threads_are_waited_for() -> None:
    numbers = streams.pinned([4], torch.float32)
    thread = threading.Thread(target=_fill, args=(numbers,))
    thread.start()
    thread.join()
    numbers.tolist()
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(_fill, numbers).result() == 1
        numbers.tolist()
    done = threading.Event()
    threading.Thread(target=lambda: (_fill(numbers), done.set())).start()
    done.wait()
    numbers.tolist()


@_race
def _a_graph_is_recorded_on_a_side_stream() -> None:
    weight = torch.ones(4, requires_grad=True)
    with _forked() as side:
        (weight * 2).sum()
    streams.current_stream().wait_stream(side)


@_order
def _a_side_stream_reads_without_a_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    with _forked() as side, torch.no_grad():
        weight * 2
    with streams.stream(side):
        weight.detach() * 2
    checkpoint(lambda x: x * weight, torch.ones(4), use_reentrant=False).sum().backward()


@pytest.mark.parametrize("program", RACES, ids=lambda program: program.__name__)
def test_a_race_is_found(program: Callable[[], None]) -> None:
    assert simulate(program).races


@pytest.mark.parametrize("program", ORDERS, ids=lambda program: program.__name__)
def test_an_order_is_accepted(program: Callable[[], None]) -> None:
    assert simulate(program).races == {}


def test_a_race_names_both_operations_streams_and_lines() -> None:
    (race,) = simulate(_writes_what_another_stream_reads).races
    kind, first, second = race.splitlines()
    assert kind == "two streams use the same bytes, and neither waits for the other:"
    assert first.strip().startswith("aten::ones writes on main at tests/streams/test_simulation.py:")
    assert second.strip().startswith("aten::sum reads on stream 1 of tests/streams/test_simulation.py at tests/")
    assert all("_writes_what_another_stream_reads" in access for access in (first, second))


def _host_reads() -> None:
    torch.ones(4).sum().item()
    torch.ones(4).tolist()


def test_waits_of_the_host_are_noted() -> None:
    lines = {wait.rpartition(" ")[0] for wait in simulate(_host_reads).waits if wait.endswith(" _host_reads")}
    assert len(lines) == 2
