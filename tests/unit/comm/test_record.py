"""The record of a rank's collectives, tags that keep messages apart, and what a device has not reached yet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.comm import collectives, record, streams
from core.comm.call import NUM_CALLS_KEPT, Collective, message_tag, recorded_collective
from core.comm.collectives import all_reduce_by_backend
from core.comm.record import ask_other_ranks, latest_collective, record_of, recorded
from tests.unit._ranks import fake_world
from tests.unit._spawn import give_up_soon, on_ranks, run_distributed
from tests.unit.distributed._toys import batches, build, loss_of, toy


class Event:
    """A point that the device has reached once `done` is set."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def enqueue(what: str, event: Event, group: Any = None) -> None:
    """Records a collective as on a GPU: it returns when it is enqueued."""
    with (
        mock.patch.object(streams, "record_event", lambda: event),
        record_of(group).collective("all-reduce", what, 4, on_device=True),
    ):
        pass


def test_calls_are_counted_by_group_and_kind():
    with fake_world(rank=0, world_size=4):
        record = record_of()
        for _ in range(2):
            with recorded("all-gather", "unit a", 8):
                assert latest_collective().ended_at is None
        with recorded("all-reduce", "unit a", torch.ones(3)) as call:
            pass
        assert (call.number, call.occurrence, call.num_bytes) == (3, 1, 12)
        assert record.num_calls == 3 and latest_collective() is call and call.ended_at is not None
        for _ in range(2 * NUM_CALLS_KEPT):
            recorded("all-gather", "unit b", 8).end()
        assert len(record.calls) == NUM_CALLS_KEPT
        assert record_of(dist.new_group([0, 1])).num_calls == 0


def test_errors_of_other_causes_pass():
    with fake_world(rank=0, world_size=2), pytest.raises(ZeroDivisionError), recorded("all-gather", "unit a", 8):
        raise ZeroDivisionError


def test_tags_tell_collectives_apart():
    with fake_world(rank=0, world_size=2):
        assert message_tag(7) == 7
        tags = set()
        for kind, what in (("all-gather", "a"), ("all-gather", "a"), ("all-gather", "b"), ("all-reduce", "a")):
            with recorded(kind, what, 8):
                tags.add(message_tag(7))
                with recorded("all-gather", "inner", 8):
                    pass
                tags.add(message_tag(7))
        assert len(tags) == 4 and all(0 <= tag < 2**31 and tag & 0xFFFF == 7 for tag in tags)


def test_reentrant_and_threaded_entry():
    with fake_world(rank=0, world_size=2):
        with recorded("all-gather", "around", 8) as around:
            with recorded("reduce-scatter", "unit a", 8) as call:
                with call, ThreadPoolExecutor(1) as lane:
                    assert lane.submit(_entered, call).result() == (call, None)
                assert recorded_collective() is call
            assert recorded_collective() is around
        assert recorded_collective() is None


def _entered(call: Collective) -> tuple[Collective | None, Collective | None]:
    """Enters a collective on this thread, and returns the thread's collective inside and after it."""
    with call:
        inside = recorded_collective()
    return inside, recorded_collective()


def _exchanges_different_things() -> bool:
    group = dist.new_group()
    mine = torch.full((2,), float(dist.get_rank()))
    gathered = torch.empty(4)
    what = "unit a" if dist.get_rank() == 0 else "unit b"
    give_up_soon(group)
    try:
        collectives.all_gather(gathered, mine, group, what=what)
    except RuntimeError:
        return False
    return True


def test_messages_of_different_collectives_do_not_match():
    assert run_distributed(_exchanges_different_things, 2) == [False, False]


def _records_of_a_step(kind: str) -> list[tuple[str, str]]:
    group = dist.new_group()
    model = build(kind, toy(tied=False), group=group)
    before = record_of(group).num_calls
    loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    assert all(call.ended_at is not None for call in record_of(group).calls)
    return [(call.kind, call.what) for call in record_of(group).calls if call.number > before]


def test_every_collective_of_a_step_is_recorded_with_its_unit():
    first, second = run_distributed(_records_of_a_step, 2, "fsdp2")
    assert first == second
    units = ["unit embedding", "unit blocks.0", "unit blocks.1", "unit head"]
    gathered = [what for kind, what in first if kind == "all-gather"]
    assert gathered[:5] == [f"the parameters of {unit}" for unit in ["the root unit", *units]]
    reduced = [what for kind, what in first if kind == "reduce-scatter"]
    assert sorted(reduced) == sorted(f"the gradients of {unit}" for unit in units)
    first, second = run_distributed(_records_of_a_step, 2, "zero1")
    assert first == second and first[0] == ("reduce-scatter", "the gradients of bucket head.weight")


def test_recording_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("SHARDSTACK_RECORD_COLLECTIVES", "0")
    with fake_world(rank=0, world_size=2):
        with recorded("all-gather", "unit a", 8) as call:
            assert message_tag(7) == 7
        call.end()
        assert latest_collective() is not call and record_of().num_calls == 0
        with pytest.raises(ZeroDivisionError), call:
            raise ZeroDivisionError


def test_published_calls_include_first_unfinished():
    store = dist.HashStore()
    with fake_world(rank=0, world_size=2), mock.patch.object(record, "_store", lambda: store):
        calls = [recorded("all-gather", f"unit {index}", 8) for index in range(40)]
        for call in calls[:10]:
            call.end()
        record.publish(record_of())
        published = record.read_published(record_of(), 0)
    assert published is not None and published["num_calls"] == 40
    assert [number for number, *_ in published["calls"]] == [*range(7, 15), *range(33, 41)]


def test_ranks_publish_only_when_asked():
    store, listener = dist.HashStore(), record._Listener()
    with mock.patch.object(record, "_publish_all") as publish:
        listener._answer(store)
        assert not publish.called
        for question in (1, 2):
            store.add(record._QUESTIONS, 1)
            for _ in range(2):  # the second look finds no other question
                listener._answer(store)
            assert publish.call_count == question
            assert store.add(record._answers(question), 0) == 1


@on_ranks(2)
def test_ranks_publish_their_records_once_one_asks():
    group = dist.new_group()
    with recorded("all-reduce", "the loss", 8, group):
        pass
    dist.barrier(group)
    if dist.get_rank() == 0:
        ask_other_ranks()
    dist.barrier(group)
    assert record.read_published(record_of(group), 1 - dist.get_rank()) is not None


def test_enqueued_collective_is_not_over() -> None:
    with fake_world(rank=0, world_size=2):
        events = [Event(done=True), Event(), Event()]
        for number, event in enumerate(events):
            enqueue(f"bucket {number}", event)
        calls = record_of()
        assert [call.is_over for call in calls.calls] == [True, False, False]
        assert calls.first_unfinished() is calls.calls[1]
        assert [call.as_json()[-2] is None for call in calls.calls] == [False, True, True]
        events[1].done = events[2].done = True
        assert calls.first_unfinished() is None and calls.calls[2].as_json()[-2] is not None


def test_the_first_unfinished_call_outlives_the_ring() -> None:
    with fake_world(rank=0, world_size=2):
        late = Event()
        enqueue("the late one", late)
        for _ in range(2 * NUM_CALLS_KEPT):
            enqueue("others", Event(done=True))
        actual = record_of().first_unfinished()
        assert actual is not None and actual.what == "the late one"
        late.done = True
        enqueue("others", Event(done=True))
        assert record_of().first_unfinished() is None


def test_every_unfinished_call_outlives_the_ring() -> None:
    with fake_world(rank=0, world_size=2):
        events = [Event() for _ in range(3 * NUM_CALLS_KEPT)]
        for number, event in enumerate(events):
            enqueue(f"call {number}", event)
        for event in events[:100]:
            event.done = True
        actual = record_of().first_unfinished()
        assert actual is not None and actual.what == "call 100"
        for event in events[100:]:
            event.done = True
        enqueue("the last", Event())
        assert len(record_of().calls) == NUM_CALLS_KEPT and record_of().calls[-1].what == "the last"


class _Captured(Event):
    """An event that was recorded while a graph was captured."""

    def query(self) -> bool:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


def test_collectives_of_a_captured_graph_are_not_recorded() -> None:
    with (
        fake_world(rank=0, world_size=2),
        mock.patch.object(streams, "is_asynchronous", lambda device: True),
        mock.patch.object(dist, "all_reduce", return_value=None),
    ):
        for is_captured, event in ((True, _Captured), (False, Event)):
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
        mock.patch.object(streams, "record_event", Event),
        mock.patch.object(streams, "is_asynchronous", lambda device: device.type == "meta"),
        mock.patch.object(streams, "is_current_stream_capturing", lambda: False),
    ):
        with mock.patch.object(dist, "all_reduce", return_value=None):
            all_reduce_by_backend(torch.ones(2, device="meta"), what="the loss")
            all_reduce_by_backend(torch.ones(2), what="the loss")
        assert [call.event is None for call in record_of().calls] == [False, True]
