"""Batches that are read and copied ahead; streams that note what happens stand in for a GPU's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from core.base import device
from core.base.errors import DataError
from core.training import data as device_batches
from core.training.data import BATCHES_AHEAD, Batch, DeviceBatches, SideStream
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu

LIMIT_S = 600.0


def batch(number: int) -> Batch:
    return {"tokens": torch.full((1, 4), number), "document_starts": torch.zeros(1, 4)}


class _Copies:
    """Notes when copies start and when they are waited for, and lets a test wait until they have started."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: list[int] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def start(self, batch: Batch) -> Any:
        number = int(batch["tokens"][0, 0])
        with self._changed:
            self.started.append(number)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
        return lambda: (self.waited.append(number), batch)[1]

    def wait_until_started(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.started, LIMIT_S)


def _numbers(batches: Iterator[Batch], count: int) -> list[int]:
    return [int(next(batches)["tokens"][0, 0]) for _ in range(count)]


def test_batches_are_copied_ahead_and_waited_for_when_used() -> None:
    copies = _Copies()
    with DeviceBatches(map(batch, range(10)), copies.start) as batches:
        copies.wait_until_started(BATCHES_AHEAD - 1)
        assert copies.waited == []
        for number in range(3):
            assert _numbers(batches, 1) == [number]
            copies.wait_until_started(number + BATCHES_AHEAD)
            assert copies.waited == list(range(number + 1))
            assert copies.started == list(range(number + BATCHES_AHEAD + 1))  # and no further
    assert threading.get_ident() not in copies.threads and len(copies.threads) == 1


def test_an_iterator_ends_after_its_last_batch_and_stays_there() -> None:
    with DeviceBatches(map(batch, range(3)), _Copies().start) as batches:
        assert len(list(batches)) == 3
        for _ in range(BATCHES_AHEAD + 2):
            assert next(batches, None) is None


def test_an_error_in_reading_is_raised_where_the_batch_is_used() -> None:
    def read() -> Iterator[Batch]:
        yield batch(0)
        raise DataError("damaged")

    copies = _Copies()
    with DeviceBatches(read(), copies.start) as batches:
        assert _numbers(batches, 1) == [0]
        with pytest.raises(DataError, match="damaged"):
            next(batches)


def test_closing_ends_the_thread_with_the_batch_that_it_reads() -> None:
    reads, goes_on = threading.Event(), threading.Event()
    read_after: list[int] = []

    def read() -> Iterator[Batch]:
        reads.set()
        assert goes_on.wait(LIMIT_S)
        yield batch(0)
        read_after.append(1)
        yield batch(1)

    copies = _Copies()
    batches = DeviceBatches(read(), copies.start)
    assert reads.wait(LIMIT_S)
    batches._ahead[-1].add_done_callback(lambda read: goes_on.set())  # when closing cancels the next read
    batches.close()
    batches.close()
    assert copies.started == [0] and not read_after
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_on_cpu_batches_pass_through() -> None:
    read: list[int] = []

    def made(number: int) -> Batch:
        read.append(number)
        return batch(number)

    with DeviceBatches(map(made, range(5))) as batches:
        assert read == []
        first = next(batches)
        assert read == [0] and set(first) == {"tokens", "document_starts"}
        assert _numbers(batches, 4) == [1, 2, 3, 4]


class _Tensor:
    """Notes where it is copied to."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def to(self, place: torch.device, non_blocking: bool) -> _Tensor:
        self._log.append(f"{self._name} to {place} {'' if non_blocking else 'and wait '}on {_Streams.current}")
        return self

    def __str__(self) -> str:
        return self._name


class _Streams:
    """What `core.comm.streams` is asked for: a stream has a name, and the log says what is done with it."""

    current = "main"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def Stream(self) -> str:
        return "side"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        _Streams.current = stream
        yield
        _Streams.current = "main"

    def current_stream(self) -> Any:
        stream = mock.MagicMock()
        name = _Streams.current
        stream.__str__.return_value = name  # type: ignore[attr-defined]
        stream.wait_event = lambda event: self._log.append(f"{name} waits for {event}")
        return stream

    def record_event(self) -> str:
        self._log.append(f"event on {_Streams.current}")
        return "event"

    def used_on(self, tensor: _Tensor, stream: Any) -> None:
        self._log.append(f"{tensor} used on {stream}")


def test_the_computing_stream_waits_for_a_copy_and_keeps_memory() -> None:
    log: list[str] = []
    made: Any = {"tokens": _Tensor(log, "tokens"), "document_starts": _Tensor(log, "starts")}
    with (
        mock.patch.object(device_batches, "streams", _Streams(log)),
        mock.patch.object(device, "current_device", lambda: torch.device("cuda", 0)),
    ):
        wait = SideStream().start(made)
        assert log == ["tokens to cuda:0 on side", "starts to cpu on side", "event on side"]
        log.clear()
        assert list(wait()) == list(made)
    assert log == ["main waits for event", "tokens used on main"]


@pytest.mark.gpu
@needs_gpu
def test_no_batch_is_overwritten_before_the_gpu_has_read_it() -> None:
    with one_rank_on_a_gpu():
        made = [{"tokens": torch.full((1 << 18,), number).pin_memory()} for number in range(40)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            with DeviceBatches(iter(made)) as batches:
                rows = []
                for one in batches:
                    assert one["tokens"].is_cuda
                    torch.cuda._sleep(20_000_000)  # so that the host has copied all long before they are read
                    rows.append(one["tokens"].double().sum())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.stack(rows).tolist() == [float(number << 18) for number in range(40)]
