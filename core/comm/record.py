"""The last calls of this rank in each process group, so that ranks out of step can be compared.

    with recorded("all-gather", "unit decoder.layers.3", num_bytes, group):
        ...                                                  # the collective; an error in it is explained

`collectives` does this for every call. It costs an append to a ring in memory and a few dictionary look-ups; nothing
is sent while all is well. When a collective fails, its rank asks the others through the store of the default process
group: a thread of every process looks about once a second for a question, and answers it while the rank does anything
else. ``SHARDSTACK_RECORD_COLLECTIVES=0``, on every rank, switches all of it off.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NUM_CALLS_KEPT = 64
"""Calls that each rank remembers of each group."""

NUM_CALLS_PUBLISHED = 8
"""How many of these the other ranks can read once one has asked."""


_EXPLAIN: list[Callable[[BaseException, Collective], None]] = []
"""At most one; `explain_failures_with` sets it, when what knows the words for failures is imported."""


def explain_failures_with(explain: Callable[[BaseException, Collective], None]) -> None:
    """Sets what is called with an error that was raised in a collective, to raise a better one or return."""
    _EXPLAIN[:] = [explain]


class Collective:
    """One call of a collective: a context manager around it, or `ended` and `explain` where it ends elsewhere.

    Attributes:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
        subject: what it carries, as a unit or a bucket.
        occurrence: how many calls of this kind and subject there have been in the group, this one included.
        number: how many calls of any kind there have been.
    """

    __slots__ = ("ended_at", "kind", "num_bytes", "number", "occurrence", "outer", "record", "started_at", "subject")

    def __init__(self, record: CollectiveRecord, kind: str, subject: str, num_bytes: int) -> None:
        self.record, self.kind, self.subject, self.num_bytes = record, kind, subject, num_bytes
        self.number, self.occurrence = record.count(kind, subject)
        self.started_at = time.time()
        self.ended_at: float | None = None  # set by `ended`, on any thread; None while it is under way
        self.outer: Collective | None = None  # what the thread was in when it entered this one; valid until it leaves

    def ended(self) -> None:
        """Notes that its result is there; on an accelerator, that it has been enqueued."""
        self.ended_at = time.time()

    def __enter__(self) -> Collective:
        self.outer, _here.collective = getattr(_here, "collective", None), self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _here.collective = self.outer
        if error is None:
            self.ended()
        else:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raises what `error`, raised while ranks waited for each other in this collective, means.

        Raises:
            OutOfStepError: from `error`; nothing is raised where it has another cause.
        """
        for explain in _EXPLAIN:
            explain(error, self)

    def as_json(self) -> list[Any]:
        """What other ranks can read of it."""
        return [
            self.number,
            self.occurrence,
            self.kind,
            self.subject,
            self.num_bytes,
            self.started_at,
            self.ended_at,
        ]


class _Unrecorded(Collective):
    """What `recorded` returns while recording is off."""

    def __init__(self) -> None:
        self.ended_at = None

    def ended(self) -> None:
        pass

    def __enter__(self) -> Collective:
        return self

    def __exit__(self, *unused: Any) -> None:
        pass

    def explain(self, error: BaseException) -> None:
        pass


class CollectiveRecord:
    """The last calls of this rank in one group, the oldest first.

    Attributes:
        rank: of this process in the group; `ranks` are those of its members in the world.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name, self.rank, self.num_ranks = group.group_name, group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.calls: deque[Collective] = deque(maxlen=NUM_CALLS_KEPT)
        self.num_calls = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        # What `publish` has written last: the number of calls and the end of the last one.
        self._published: tuple[int, float | None] | None = None

    def count(self, kind: str, subject: str) -> tuple[int, int]:
        """The numbers of a new call: among all, and among those of its kind and subject."""
        self.num_calls += 1
        self._counts[kind, subject] += 1
        return self.num_calls, self._counts[kind, subject]

    def collective(self, kind: str, subject: str, num_bytes: int) -> Collective:
        """Notes that a collective begins."""
        call = Collective(self, kind, subject, num_bytes)
        self.calls.append(call)
        return call

    def publish(self) -> None:
        """Lets the other ranks read the last calls, if there is something new."""
        calls = list(self.calls)[-NUM_CALLS_PUBLISHED:]
        state = (self.num_calls, calls[-1].ended_at if calls else None)
        if state == self._published:
            return
        text = json.dumps({"num_calls": state[0], "calls": [call.as_json() for call in calls]})
        _store().set(_key(self.group_name, self.rank), text)
        self._published = state

    def read(self, rank: int) -> dict[str, Any] | None:
        """What `rank` of the group answered last; None if it never did (`ask_other_ranks`) or the store has gone."""
        try:
            key = _key(self.group_name, rank)
            found: dict[str, Any] | None = json.loads(_store().get(key)) if _store().check([key]) else None
        except Exception:  # the store may have gone with the rank that held it
            return None
        return found


def recorded(
    kind: str, subject: str, payload: torch.Tensor | int, group: dist.ProcessGroup | None = None
) -> Collective:
    """A collective that begins now, to be entered: ``with recorded(...):``.

    Args:
        kind: what it does: all-gather, reduce-scatter, all-reduce, ...
        subject: what it does it to, in the words of a message.
        payload: the larger of the tensors that it is called with, or its bytes; 0 for what is not counted.
        group: the ranks; all of them by default.
    """
    if not is_recording():
        return _UNRECORDED
    num_bytes = payload if isinstance(payload, int) else payload.numel() * payload.element_size()
    return record_of(group).collective(kind, subject, num_bytes)


def record_of(group: dist.ProcessGroup | None = None) -> CollectiveRecord:
    """This rank's record of the group, begun at its first call."""
    asked = group if group is not None else dist.group.WORLD
    if asked is None:
        raise RuntimeError("there is no process group yet")
    record = _records.get(asked)
    if record is None:
        record = _records[asked] = CollectiveRecord(asked)
        _every_record.append(weakref.ref(record))
        if asked.size() > 1 and dist.get_backend(asked) != "fake":
            _listener.ensure_running()
    return record


def is_recording() -> bool:
    """Whether collectives are recorded: ``SHARDSTACK_RECORD_COLLECTIVES``, read at each call."""
    return os.environ.get("SHARDSTACK_RECORD_COLLECTIVES", "1") != "0"


def latest_collective() -> Collective | None:
    """What this rank has called last, in any group."""
    latest = [record.calls[-1] for record in _live_records() if record.calls]
    return max(latest, key=lambda call: call.started_at, default=None)


def _live_records() -> list[CollectiveRecord]:
    return [record for reference in list(_every_record) if (record := reference()) is not None]


def recorded_collective() -> Collective | None:
    """The collective that this thread is in."""
    call: Collective | None = getattr(_here, "collective", None)
    return call


def message_tag(tag: int) -> int:
    """`tag`, of 16 bits, with a hash above it of the collective that this thread is in.

    A rank that is elsewhere then finds no message to take for its own: it waits, instead of computing with what was
    meant for another tensor of the same size.
    """
    call = recorded_collective()
    if call is None:
        return tag
    return (zlib.crc32(f"{call.kind}\0{call.subject}\0{call.occurrence}".encode()) & 0x7FFF) << 16 | tag


_records: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveRecord] = weakref.WeakKeyDictionary()
_every_record: list[weakref.ref[CollectiveRecord]] = []  # of `_records`; the listener copies a list in one go
_here = threading.local()  # .collective: what the thread is in; `Collective.__enter__` and `__exit__` set it
_UNRECORDED = _Unrecorded()


# ---- asking the other ranks


def ask_other_ranks() -> None:
    """Makes every rank publish its record, and waits until those that can have done so.

    Without a store there is nothing to wait for.
    """
    try:
        _store().add(_QUESTIONS, 1)
        _publish_all()
    except Exception:  # the store may have gone with the rank that held it
        return
    time.sleep(1.5 * _listening_interval_s())


def _publish_all() -> None:
    for record in _live_records():
        if record.num_ranks > 1:
            record.publish()


def _listening_interval_s() -> float:
    """Seconds between two looks into the store: more where more ranks share it."""
    return max(1.0, (dist.get_world_size() if dist.is_initialized() else 1) / 256)


_FAILURES_BEFORE_GIVING_UP = 5


class _Listener:
    """A thread that publishes this process's records once a rank has asked; it ends with the process, or when the
    store has gone. It polls: torch aborts a process that ends while a thread waits in a store.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # started at the first record of several ranks
        self._stop = threading.Event()  # set at exit
        self._answered = b""  # the number of the last question, as the store has it; the thread alone uses it
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
        failures = 0
        while failures < _FAILURES_BEFORE_GIVING_UP and not self._stop.wait(_listening_interval_s()):
            if not dist.is_initialized():
                continue  # between two initialisations
            try:
                self._answer(_store())
                failures = 0
            except Exception:  # a time limit of the store, or the rank that held it has left
                failures += 1

    def _answer(self, store: Any) -> None:
        if not store.check([_QUESTIONS]):  # else reading it would wait
            return
        question = store.get(_QUESTIONS)
        if question != self._answered:
            _publish_all()
            self._answered = question


_listener = _Listener()
_QUESTIONS = "shardstack/collectives/questions"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(group_name: str, rank: int) -> str:
    return f"shardstack/collectives/{group_name}/{rank}"
