"""Reads of a device's numbers, and what is said of a device that does not get there; events stand in for a GPU's."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import core.diagnostics  # noqa: F401  # which explains
from core.base import device
from core.base.errors import OutOfStepError
from core.comm import lane, streams
from core.comm.call import NUM_CALLS_KEPT
from core.comm.collectives import all_reduce_by_backend
from core.comm.lane import HostRead
from core.comm.record import record_of
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._ranks import fake_world
from tests.unit._spawn import JOB_LIMIT_S, reach, run_distributed, wait_for


class _Event:
    """A point that the device has reached once `done` is set."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def _enqueue(what: str, event: _Event, group: Any = None) -> None:
    """Records a collective as on a GPU: it returns when it is enqueued."""
    with (
        mock.patch.object(streams, "record_event", lambda: event),
        record_of(group).collective("all-reduce", what, 4, on_device=True),
    ):
        pass


def test_read_takes_values_at_construction() -> None:
    values = torch.tensor([1.0, 2.5], dtype=torch.float64)
    read = HostRead(values)
    values.zero_()
    assert read.wait() == read.wait() == [1.0, 2.5]


def test_enqueued_collective_is_not_over() -> None:
    with fake_world(rank=0, world_size=2):
        events = [_Event(done=True), _Event(), _Event()]
        for number, event in enumerate(events):
            _enqueue(f"bucket {number}", event)
        record = record_of()
        assert [call.is_over for call in record.calls] == [True, False, False]
        assert record.first_unfinished() is record.calls[1]
        assert [call.as_json()[-2] is None for call in record.calls] == [False, True, True]
        events[1].done = events[2].done = True
        assert record.first_unfinished() is None and record.calls[2].as_json()[-2] is not None


def test_the_first_unfinished_call_outlives_the_ring() -> None:
    with fake_world(rank=0, world_size=2):
        late = _Event()
        _enqueue("the late one", late)
        for _ in range(2 * NUM_CALLS_KEPT):
            _enqueue("others", _Event(done=True))
        actual = record_of().first_unfinished()
        assert actual is not None and actual.what == "the late one"
        late.done = True
        _enqueue("others", _Event(done=True))
        assert record_of().first_unfinished() is None


def test_every_unfinished_call_outlives_the_ring() -> None:
    with fake_world(rank=0, world_size=2):
        events = [_Event() for _ in range(3 * NUM_CALLS_KEPT)]
        for number, event in enumerate(events):
            _enqueue(f"call {number}", event)
        for event in events[:100]:
            event.done = True
        actual = record_of().first_unfinished()
        assert actual is not None and actual.what == "call 100"
        for event in events[100:]:
            event.done = True
        _enqueue("the last", _Event())
        assert len(record_of().calls) == NUM_CALLS_KEPT and record_of().calls[-1].what == "the last"


class _Captured(_Event):
    """An event that was recorded while a graph was captured."""

    def query(self) -> bool:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


def test_collectives_of_a_captured_graph_are_not_recorded() -> None:
    with (
        fake_world(rank=0, world_size=2),
        mock.patch.object(streams, "is_asynchronous", lambda device: True),
        mock.patch.object(dist, "all_reduce", return_value=None),
    ):
        for is_captured, event in ((True, _Captured), (False, _Event)):
            with (
                mock.patch.object(streams, "is_current_stream_capturing", lambda captures=is_captured: captures),
                mock.patch.object(streams, "record_event", event),
            ):
                all_reduce_by_backend(torch.ones(2), what=f"captured: {is_captured}")
        actual = record_of().first_unfinished()
        assert actual is not None and actual.what == "captured: False"


def test_failed_call_is_not_under_way() -> None:
    with fake_world(rank=0, world_size=2):
        with pytest.raises(OSError, match="disk full"), record_of().collective("save", "the checkpoint", 0):
            raise OSError("disk full")
        assert not record_of().calls[0].is_over and record_of().first_unfinished() is None


def test_a_tensor_on_the_device_is_recorded_with_an_event() -> None:
    with (
        fake_world(rank=0, world_size=2),
        mock.patch.object(streams, "record_event", _Event),
        mock.patch.object(streams, "is_asynchronous", lambda device: device.type == "meta"),
        mock.patch.object(streams, "is_current_stream_capturing", lambda: False),
    ):
        with mock.patch.object(dist, "all_reduce", return_value=None):
            all_reduce_by_backend(torch.ones(2, device="meta"), what="the loss")
            all_reduce_by_backend(torch.ones(2), what="the loss")
        assert [call.event is None for call in record_of().calls] == [False, True]


def _waits_for_a_rank_that_never_came() -> str:
    group = dist.new_group()
    record_of(group).limit_s = 1.0
    _enqueue("the loss", _Event(done=True), group)
    if dist.get_rank() == 1:
        _enqueue("the gradient norm", _Event(), group)
        reach("rank 1 waits for another")
        wait_for("rank 0 has its message")
        return ""
    wait_for("rank 1 waits for another")
    _enqueue("the gradients of bucket a", _Event(), group)
    _enqueue("the gradient norm", _Event(), group)
    try:
        with mock.patch.object(lane, "_LATE_CHECK_INTERVAL_S", 0.1), pytest.raises(OutOfStepError) as caught:
            lane.wait_for(_Event())
    finally:
        reach("rank 0 has its message")
    return str(caught.value)


def test_waiting_device_is_explained_before_timeout() -> None:
    (message, _) = run_distributed(_waits_for_a_rank_that_never_came, 2)
    assert message.startswith("rank 0 of 2 waited ")
    assert "s for all-reduce 1 of the gradients of bucket a (4 B), its call 2 in this group" in message
    assert "rank 1 waited in all-reduce 1 of the gradient norm (4 B) instead, its call 2" in message
    assert "timed out waiting 900ms for the device to end all-reduce 2" in message  # of one second less a tenth


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
    record_of(group).limit_s = 1.0
    if dist.get_rank() == 1:
        wait_for("rank 0 has its message")
        return ""
    with mock.patch.object(sys, "stderr", _Messages()) as messages:
        _enqueue("the gradients of bucket a", _Event(), group)
        assert messages.has_line.wait(JOB_LIMIT_S / 6)
    reach("rank 0 has its message")
    return messages.line


def test_stuck_host_is_explained_on_stderr() -> None:
    (message, _) = run_distributed(_is_stuck_in_the_driver, 2)
    assert message.startswith("rank 0 of 2 waited ")
    assert "s for all-reduce 1 of the gradients of bucket a (4 B), its call 1 in this group" in message
    assert "rank 1 " in message and "timed out waiting 900ms" in message


def test_host_waits_without_late_collective() -> None:
    event = _Event()
    with fake_world(rank=0, world_size=2), mock.patch.object(lane, "_LATE_CHECK_INTERVAL_S", 0.0):
        _enqueue("the loss", _Event())
        looks = iter(range(50))
        with mock.patch.object(event, "query", lambda: next(looks, None) is None):
            lane.wait_for(event)


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
        mock.patch.object(record, "limit_s", 1.0),
        mock.patch.object(lane, "_LATE_CHECK_INTERVAL_S", 0.1),
        pytest.raises(late) as caught,
    ):
        lane.wait_for(behind)
    assert record.first_unfinished() is None  # nothing is said twice
    arrive()
    assert call.is_over
    lane.wait_for(behind)
    assert HostRead(numbers).wait() == [1.0, 2.0]
    return str(caught.value)


def _late_by_an_event_of_ours() -> str:
    event = _Event()
    with mock.patch.object(streams, "record_event", lambda: event):
        return _late_and_then_over(torch.tensor([1.0, 2.0]), lambda: None, lambda: setattr(event, "done", True))


def test_late_collective_behind_long_work_is_named() -> None:
    (message,) = run_distributed(_late_by_an_event_of_ours, 1)
    assert re.search(r"timed out waiting 900ms for the device to end all-reduce \d+", message)


@pytest.mark.gpu
@needs_gpu
def test_late_collective_behind_gpu_work_is_named() -> None:
    cycles = int(20 * 2e9)  # twenty seconds, at two GHz: the host has until then to notice
    with one_rank_on_a_gpu():
        numbers = torch.tensor([1.0, 2.0], device=device.current_device())
        message = _late_and_then_over(numbers, lambda: torch.cuda._sleep(cycles), torch.cuda.synchronize)
    assert re.search(r"timed out waiting 900ms for the device to end all-reduce \d+", message)
