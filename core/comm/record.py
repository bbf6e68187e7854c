"""Records the last collectives of this rank in each process group, to compare ranks that are out of step.

    with recorded("all-gather", "unit decoder.layers.3", num_bytes, group):
        ...                                                  # the collective; an error in it is explained

`collectives` does this for every call. A call costs an append to a ring in memory and a few dictionary look-ups;
nothing is sent until a collective fails. Its rank then asks the others through the store of the default process group:
in every process a thread looks about once a second for a question and answers it. ``SHARDSTACK_RECORD_COLLECTIVES=0``,
set on every rank, switches recording off.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import OutOfStepError
from . import streams
from .awaited_messages import AwaitedMessage, late_message
from .call import UNRECORDED, Collective, CollectiveRecord, Position, positions

NUM_CALLS_PUBLISHED = 8
"""Calls per group that a rank publishes when another one asks: as many of the last calls, and as many around the first
unfinished one."""


def publish(record: CollectiveRecord) -> None:
    """Writes a record's last calls into the store for other ranks, if there are new ones, and those around the first
    that is not over: under NCCL the host may be many calls ahead of it."""
    recent = list(record.calls)
    first = next((index for index, call in enumerate(recent) if call.is_under_way), len(recent))
    near = range(first - NUM_CALLS_PUBLISHED // 2, first + NUM_CALLS_PUBLISHED // 2)
    last = range(len(recent) - NUM_CALLS_PUBLISHED, len(recent))
    calls = [call for index, call in enumerate(recent) if index in near or index in last]
    table = {"num_calls": record.num_calls, "calls": [call.as_json() for call in calls]}
    if table != record.published_table:
        write_to_store(_key(record.group_name, record.rank), table)
        record.published_table = table


def read_published(record: CollectiveRecord, rank: int) -> dict[str, Any] | None:
    """Returns what `rank` of the record's group published last, or None if it never did, or if the store is gone."""
    table: dict[str, Any] | None = read_from_store(_key(record.group_name, rank))
    return table


def recorded(kind: str, what: str, payload: torch.Tensor | int, group: dist.ProcessGroup | None = None) -> Collective:
    """Records that a collective begins, and returns it as a context manager: ``with recorded(...):``.

    Args:
        kind: all-gather, reduce-scatter, all-reduce, ...
        what: the payload as messages name it.
        payload: the larger of the collective's tensors, or a number of bytes; 0 if messages should give no size.
        group: None means all ranks.
    """
    if not is_recording():
        return UNRECORDED
    if isinstance(payload, int):
        return record_of(group).collective(kind, what, payload)
    on_device = streams.is_asynchronous(payload.device)
    if on_device and streams.is_current_stream_capturing():  # it runs later, and no event may be queried until then
        return UNRECORDED
    return record_of(group).collective(kind, what, payload.numel() * payload.element_size(), on_device=on_device)


def record_of(group: dist.ProcessGroup | None = None) -> CollectiveRecord:
    """Returns this rank's record of a group. The first call creates it."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group yet")
    record = _records.get(group)
    if record is None:
        record = _records[group] = CollectiveRecord(group)
        _every_record[:] = [ref for ref in _every_record if ref() is not None] + [weakref.ref(record)]
        if group.size() > 1 and dist.get_backend(group) != "fake":
            _listener.ensure_running()
    return record


def call_counts() -> dict[str, tuple[int, bool]]:
    """Returns, for each group by name, the number of this rank's calls, and whether one has not ended."""
    return {record.group_name: (record.num_calls, record.first_unfinished() is not None) for record in live_records()}


def is_recording() -> bool:
    """Returns whether collectives are recorded. Reads ``SHARDSTACK_RECORD_COLLECTIVES`` at each call."""
    return os.environ.get("SHARDSTACK_RECORD_COLLECTIVES", "1") != "0"


def latest_collective() -> Collective | None:
    """Returns the last call of this rank in any group."""
    latest = [record.calls[-1] for record in live_records() if record.calls]
    return max(latest, key=lambda call: call.started_at, default=None)


def first_unfinished(at_least_s: Callable[[CollectiveRecord], float]) -> Collective | None:
    """Returns the longest-running collective on an accelerator, in any group, or None if all are within their limit.

    Args:
        at_least_s: returns the limit in seconds, given the record of a call's group.
    """
    now = time.time()
    calls = [call for record in live_records() if (call := record.first_unfinished()) is not None]
    late = [call for call in calls if call.on_device and now - call.started_at > at_least_s(call.record)]
    return min(late, key=lambda call: call.started_at, default=None)


def raise_if_late() -> None:
    """Raises if a collective has run nearly as long as its backend lets it, after which NCCL ends the process.

    Raises:
        OutOfStepError: names the collective and the ranks that have not joined it, or the message that did not come.
        DistBackendError: the ranks are in step, and the collective takes too long all the same.
    """
    if (message := late_message(_MARGIN_S)) is not None:
        raise OutOfStepError(_did_not_come(message))
    call = first_unfinished(_longest_s)
    if call is not None:
        call.explain(error := _too_late(call))
        raise error


def _did_not_come(message: AwaitedMessage) -> str:
    return f"rank {dist.get_rank()}, {message.text}, and nothing came; look at that rank first"


_MARGIN_S = 30.0
"""Seconds before the backend's limit at which a wait counts as too long, or a tenth of a shorter limit."""


def _longest_s(record: CollectiveRecord) -> float:
    return record.limit_s - min(_MARGIN_S, record.limit_s / 10)


def _too_late(call: Collective) -> dist.DistBackendError:
    return dist.DistBackendError(
        f"timed out waiting {1000 * _longest_s(call.record):.0f}ms for the device to end {call.kind} {call.number}"
    )


def live_records() -> list[CollectiveRecord]:
    """Returns this rank's records of all groups."""
    return [record for reference in list(_every_record) if (record := reference()) is not None]


def awaited_calls() -> list[Collective]:
    """Returns the calls, in all groups, whose end on the host this rank waits for, the oldest of a group first."""
    calls = (call for record in live_records() if record.num_ranks > 1 for call in list(record.calls))
    return [call for call in calls if call.is_under_way and call.is_waited_for and not call.on_device]


def group_of(record: CollectiveRecord) -> dist.ProcessGroup | None:
    """Returns the group of a record, while it exists."""
    return next((group for group, own in list(_records.items()) if own is record), None)


_records: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveRecord] = weakref.WeakKeyDictionary()
"""Records by group. `record_of` adds on the calling thread. An entry is dropped with its group."""
_every_record: list[weakref.ref[CollectiveRecord]] = []
"""All records, as a list for the listener's thread, which copies it in one atomic operation. `record_of` adds one, and
drops records whose groups are gone."""


# ---- asking the other ranks


MOST_ASKING = 8
"""Number of ranks that compare themselves with all others after a failure. Each reads every rank's record."""


def may_ask_other_ranks() -> bool:
    """Returns whether this rank is among the first `MOST_ASKING` that ask. In a smaller world every rank may ask."""
    if dist.get_world_size() <= MOST_ASKING:
        return True
    try:
        return int(_store().add(_ASKING, 1)) <= MOST_ASKING
    except Exception:  # the store may have gone with the rank that held it
        return True


def ask_other_ranks() -> None:
    """Asks every rank to publish its record, and waits for the answers. Returns at once without a store.

    Waits at least 1.5 polling intervals, even if all ranks have answered: the rank that holds the store may leave, and
    others may not have asked yet. After that it waits until all have answered, or until no further answer has come for
    `_INTERVALS_WITHOUT_ANSWER` intervals, because busy ranks answer later.
    """
    interval = _listening_interval_s()
    asked_at = time.monotonic()
    answers, last_answer = 0, asked_at
    try:
        question = int(_store().add(_QUESTIONS, 1))
        _publish_all()
        while (now := time.monotonic()) < asked_at + 1.5 * interval or (
            answers < dist.get_world_size() and now < last_answer + _INTERVALS_WITHOUT_ANSWER * interval
        ):
            time.sleep(0.05)
            if (count := int(_store().add(_answers(question), 0))) > answers:
                answers, last_answer = count, time.monotonic()
    except Exception:  # the store may have gone with the rank that held it
        return


def _publish_all() -> None:
    for record in live_records():
        if record.num_ranks > 1:
            publish(record)
    if own := positions():
        values = {group: astuple(position) for group, position in own.items()}
        write_to_store(_key(_BY_TORCH, dist.get_rank()), values)


_BY_TORCH = "flight_recorder"
"""In the place of a group's name: the positions of a rank by torch's flight recorder, in all groups."""


def flight_recorder_of(rank: int) -> dict[str, Position]:
    """Returns where torch's flight recorder had a rank of the world, in each group, when it was asked."""
    table = read_from_store(_key(_BY_TORCH, rank)) or {}
    return {group: Position(*values) for group, values in table.items()}


def _listening_interval_s() -> float:
    """Returns the seconds between two polls of the store: more as more ranks share it."""
    return max(1.0, (dist.get_world_size() if dist.is_initialized() else 1) / 256)


_FAILURES_BEFORE_GIVING_UP = 5
_INTERVALS_WITHOUT_ANSWER = 3
"""Polls of the store without another answer, after which missing ranks are taken to be paused or gone."""


def _write_explanation(call: Collective) -> None:
    try:
        call.raise_explained(_too_late(call))
    except OutOfStepError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


class _Listener:
    """A thread that publishes this process's records when a rank asks. It ends with the process or the store.

    It polls, because torch aborts a process that exits while a thread waits in a store.
    """

    def __init__(self) -> None:
        # `ensure_running` starts it at the first group of several ranks, and again where it has given up.
        self._thread: threading.Thread | None = None
        # `stop` sets it at exit; never cleared.
        self._stop = threading.Event()
        # Number of the last question that was answered, 0 for none. `_answer` sets it, and resets it to 0 in another
        # store. Only the thread uses it.
        self._last_question = 0
        # The store that counts `_last_question`, or None. `_answer` sets it; `_run` clears it when the process group
        # was destroyed. Only the thread uses it.
        self._question_store: Any = None
        # The last call or message that `_explain_late` has explained, or None. Only the thread uses it.
        self._last_explained: Collective | AwaitedMessage | None = None
        # Looks `_LOOKS` times in each interval whether ranks wait for each other; None until this rank waits once. The
        # thread sets it, and alone uses it.
        self._watch: Any = None
        atexit.register(self.stop)

    def ensure_running(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="collective-record", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        failures = looks = 0
        while failures < _FAILURES_BEFORE_GIVING_UP and not self._stop.wait(_listening_interval_s() / _LOOKS):
            if not dist.is_initialized():  # the process group was destroyed, and may be initialised again
                self._question_store = None
                continue
            looks += 1
            try:
                if self._watch is None and awaited_calls():
                    from .out_of_step import DeadlockWatch  # once a rank waits: it compares records

                    self._watch = DeadlockWatch()
                if self._watch is not None:
                    self._watch.look()
                if looks % _LOOKS:
                    continue
                self._explain_late()
                self._answer(_store())
                failures = 0
            except Exception:  # a time limit of the store, or the rank that held it has left
                failures += 1

    def _explain_late(self) -> None:
        """Writes to stderr why the device does not go on, a little after `raise_if_late` would raise.

        A host that waits for the device in its driver, as where too much is queued, can raise nothing.
        """
        message = late_message(_MARGIN_S - 5.0)
        if message is not None:  # what is queued behind it is late too
            if message is not self._last_explained:
                self._last_explained = message
                sys.stderr.write(f"{_did_not_come(message)}\n")
                sys.stderr.flush()
            return
        call = first_unfinished(lambda record: _longest_s(record) + min(5.0, record.limit_s / 20))
        if call is None or call is self._last_explained:
            return
        self._last_explained = call
        # In a thread of its own, because an explanation waits for answers, of this listener too.
        threading.Thread(target=_write_explanation, args=(call,), name="late-collective", daemon=True).start()

    def _answer(self, store: Any) -> None:
        if not store.check([_QUESTIONS]):  # else reading it would wait
            return
        if store is not self._question_store:  # another world
            self._last_question, self._question_store = 0, store
        question = int(store.get(_QUESTIONS))
        if question > self._last_question:
            _publish_all()
        for number in range(self._last_question + 1, question + 1):
            store.add(_answers(number), 1)
            self._last_question = number


# The one listener of this process. `record_of` starts its thread.
_listener = _Listener()
_QUESTIONS = "shardstack/collectives/questions"
_ASKING = "shardstack/collectives/asking"


def write_to_store(key: str, value: Any) -> None:
    """Writes a value, as JSON, into the store for other ranks."""
    _store().set(f"shardstack/{key}", json.dumps(value))


def read_from_store(key: str) -> Any:
    """Returns the value that a rank wrote under a key, or None if there is none, or if the store is gone."""
    try:
        return json.loads(_store().get(f"shardstack/{key}")) if _store().check([f"shardstack/{key}"]) else None
    except Exception:  # the store may have gone with the rank that held it
        return None


_LOOKS = 4


def _answers(question: int) -> str:
    """Returns the key under which ranks count themselves once they have answered."""
    return f"shardstack/collectives/answers/{question}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(group_name: str, rank: int) -> str:
    return f"collectives/{group_name}/{rank}"
