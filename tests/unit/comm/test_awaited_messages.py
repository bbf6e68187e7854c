"""A message of a pipeline stage that does not come is named, though all calls have returned, as under NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from core.base.errors import OutOfStepError
from core.comm import awaited_messages, record, streams
from core.comm.awaited_messages import AwaitedMessage, late_message
from core.pipeline_parallel import stages
from tests.unit._ranks import fake_world
from tests.unit.comm.test_record import Event, enqueue


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Seconds that a test sets, in a world of two ranks with the default limit of half an hour."""
    clock = SimpleNamespace(now=1000.0, events=[])

    def made() -> Event:
        clock.events.append(Event())
        return clock.events[-1]

    monkeypatch.setattr(awaited_messages.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(streams, "record_event", made)
    awaited_messages._messages.clear()
    with fake_world(rank=1, world_size=2):
        yield clock
    awaited_messages._messages.clear()


def test_the_message_that_the_device_waits_for_is_named(clock: Any):
    first, second = (AwaitedMessage(f"message {number}", dist.group.WORLD) for number in (1, 2))
    first.end()
    second.end()
    before_first, before_second, behind_first, _ = clock.events
    clock.now += 1e6
    assert late_message(30.0) is None  # the device has not come to the first one
    before_first.done = behind_first.done = before_second.done = True
    assert late_message(30.0) is None  # its time begins now
    clock.now += 1790.0
    enqueue("the loss", Event())  # behind it on the device
    with pytest.raises(OutOfStepError, match=r"^rank 1, message 2, and nothing came; look at that rank first$"):
        record.raise_if_late()
    AwaitedMessage("message 3", dist.group.WORLD)
    assert first not in awaited_messages._messages and second in awaited_messages._messages


def test_the_listener_writes_a_late_message_once(clock: Any, capsys: pytest.CaptureFixture[str]):
    AwaitedMessage("message 1", dist.group.WORLD)
    clock.events[0].done = True
    listener = record._Listener()
    for passed in (0.0, 1772.0, 5.0, 5.0):
        clock.now += passed
        listener._explain_late()
    assert capsys.readouterr().err == "rank 1, message 1, and nothing came; look at that rank first\n"


def test_a_stage_notes_the_message_that_its_device_waits_for(clock: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "is_asynchronous", lambda device: True)
    pipeline: Any = stages.Pipeline.__new__(stages.Pipeline)
    pipeline._awaited, pipeline._stages = None, [mock.Mock(group=dist.group.WORLD)]
    stage: Any = stages.Stage.__new__(stages.Stage)
    stage.pipeline, stage.chunk, stage.group = pipeline, mock.Mock(stage="pipeline stage 1 of 2"), None
    stage.stage_index_to_group_rank = {0: 0}
    stage.note("waits for the activations", 3, 0)
    (message,) = awaited_messages._messages
    expected = "pipeline stage 1 of 2: waits for the activations of micro-batch 3 from stage 0 (rank 0)"
    assert message.text == expected and not message.has_come
    stage.note("forward", 3)
    assert len(awaited_messages._messages) == 1 and len(clock.events) == 2  # before the wait, and behind it
    clock.events[1].done = True
    assert message.has_come
