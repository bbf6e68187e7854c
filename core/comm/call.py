"""The calls of collectives: one with its name, its time and the error that explains its failure, and the last ones.

Torch's flight recorder (`positions`) has the collectives of other code too: NCCL's has every one, and gloo's lacks
messages between two ranks, and so direct exchanges (`gloo`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ..base._torch_compat import flight_recorder, group_time_limit
from . import streams

T = TypeVar("T")

NUM_CALLS_KEPT, MOST_CALLS_KEPT = 64, 4096
"""Calls that each rank keeps per group, and the maximum, counted from the first call that still runs on an
accelerator."""


class CollectiveRecord:
    """The last calls of this rank in one group.

    The threads that call collectives add calls; the listener's thread reads them to publish them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # This rank in the group, and its members' ranks in the world, in the group's order.
        self.group_name: Final[str] = group.group_name
        self.rank, self.num_ranks = group.rank(), group.size()
        self.ranks: Final = dist.get_process_group_ranks(group)
        # The oldest first. `collective` appends, and drops the oldest ones that are over.
        self.calls: deque[Collective] = deque(maxlen=MOST_CALLS_KEPT)
        # All calls so far, those that were dropped included; `count` adds.
        self.num_calls = 0
        # Seconds that the backend lets a call take.
        self.limit_s: Final = group_time_limit(group).total_seconds()
        # Calls by kind and payload; `count` adds, nothing clears.
        self._counts: Counter[tuple[str, str]] = Counter()
        # The table that `record.publish` has written last; it alone uses it, on any thread.
        self.published_table: dict[str, Any] = {}

    def count(self, kind: str, what: str) -> tuple[int, int]:
        """Counts a new call. Returns its number among all calls, and among calls of its kind and payload."""
        self.num_calls += 1
        self._counts[kind, what] += 1
        return self.num_calls, self._counts[kind, what]

    def collective(self, kind: str, what: str, num_bytes: int, on_device: bool = False) -> Collective:
        """Records that a collective begins."""
        call = Collective(self, kind, what, num_bytes, on_device)
        while len(self.calls) >= NUM_CALLS_KEPT and not self.calls[0].is_under_way:
            self.calls.popleft()
        self.calls.append(call)
        return call

    def first_unfinished(self) -> Collective | None:
        """Returns the first call that is still running, on an accelerator too, or None if all have ended or failed."""
        return next((call for call in list(self.calls) if call.is_under_way), None)


class Collective:
    """One call of a collective. Enter it around the call, or `run` the call where it may return work to wait for.
    Call `explain` if it fails elsewhere.
    """

    __slots__ = (
        *("ended_at", "event", "has_failed", "is_waited_for", "kind", "num_bytes", "number", "occurrence"),
        *("on_device", "record", "started_at", "what"),
    )

    def __init__(self, record: CollectiveRecord, kind: str, what: str, num_bytes: int, on_device: bool) -> None:
        # Fixed: the group's record, the kind ("all-gather", "reduce-scatter", ...), the payload as messages name it (a
        # unit, a bucket), and its bytes, 0 if messages should give no size.
        self.record, self.kind, self.what, self.num_bytes = record, kind, what, num_bytes
        # Whether the payload is on an accelerator, so that the call runs there after it has returned.
        self.on_device = on_device
        # Calls in the group so far, this one included: of any kind, and of this kind and payload.
        self.number, self.occurrence = record.count(kind, what)
        # Seconds of the wall clock (`time.time`), compared with those of other calls, and with the time of a message.
        self.started_at: Final = time.time()
        # Seconds of the wall clock at the end of the call, on an accelerator when it was enqueued. `end` sets it, on
        # any thread; None while the call runs, or if it failed.
        self.ended_at: float | None = None
        # Whether an error ended the call, so that nothing waits in it. `explain` sets it, on any thread,
        # or the deletion of its work (`_RecordedWork`) if nothing waited for that.
        self.has_failed = False
        # Whether a thread waits for its end, which the call or its work sets; valid while the call is under way.
        self.is_waited_for = True
        # Event at the end of the call on the accelerator; None before `end` records it, and on other devices. Any
        # thread may query it.
        self.event: streams.Event | None = None

    def end(self) -> None:
        """Records that the result is in memory, or on an accelerator that the call is enqueued on the current
        stream."""
        if self.on_device:
            self.event = streams.record_event()
        self.ended_at = time.time()

    @property
    def is_over(self) -> bool:
        """Whether the result is in memory, on an accelerator too. Waits for nothing."""
        return self.ended_at is not None and (self.event is None or self.event.query())

    @property
    def is_under_way(self) -> bool:
        """Whether the call neither has its result nor failed. Waits for nothing."""
        return not self.has_failed and not self.is_over

    def __enter__(self) -> Collective:
        _thread.calls.append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _thread.calls.pop()
        if error is None:
            self.end()
        else:
            self.explain(error)

    def run(self, start: Callable[[], dist.Work | None]) -> dist.Work | None:
        """Calls the collective. Where `start` returns work, the call ends when the returned work is waited for."""
        _thread.calls.append(self)
        try:
            work = start()
        except BaseException as error:
            self.explain(error)
            raise
        finally:
            _thread.calls.pop()
        if work is not None:
            self.is_waited_for = False
            return _RecordedWork(self, work, start)
        self.end()
        return None

    def explain(self, error: BaseException) -> None:
        """Explains an error that this collective raised. Returns if ranks out of step are not its cause.

        Raises:
            OutOfStepError: from `error`.
        """
        self.has_failed = True
        self.raise_explained(error)

    def raise_explained(self, error: BaseException) -> None:
        """Explains an error as `explain` does, without marking the call as failed."""
        from .out_of_step import raise_out_of_step  # after a failure alone: it compares what all calls have recorded

        raise_out_of_step(error, self)

    def as_json(self) -> list[Any]:
        """Returns the fields that are published to other ranks."""
        fixed = [self.number, self.occurrence, self.kind, self.what, self.num_bytes, self.started_at]
        return [*fixed, self.ended_at if self.is_over else None, self.has_failed]


Wait = Callable[[], T]
"""Waits for what was started, and returns it. Called once."""


class FunctionWork(dist.Work):
    """Work that a function waits for, which is then dropped with the tensors that it refers to. Waiting again does
    nothing, unless the function raised: it is then called again.
    """

    def __init__(self, end: Wait[None]) -> None:
        super().__init__()
        # `wait` clears it.
        self._end: Wait[None] | None = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._end is not None:
            self._end()
            self._end = None
        return True


class _RecordedWork(dist.Work):
    """Work of a collective, whose end is recorded where it is waited for, and whose failure is explained."""

    def __init__(self, call: Collective, work: dist.Work, start: Callable[[], dist.Work | None]) -> None:
        super().__init__()
        # Fixed. `wait` may be called on any thread; it ends the call, and `__del__` marks a call that never ended.
        self._call, self._work = call, work
        # Refers to the call's tensors, which NCCL and gloo keep until then too, and no backend frees while it reads
        # them. `wait` drops it.
        self._start: Callable[[], dist.Work | None] | None = start

    def __del__(self) -> None:
        # An error kept the rank from waiting for it: without this the call would count as running for ever.
        if self._call.ended_at is None:
            self._call.has_failed = True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._call.is_waited_for = True
        try:
            self._work.wait()
        except BaseException as error:
            self._call.explain(error)
            raise
        self._call.end()
        self._start = None
        return True


class _Unrecorded(Collective):
    """Does nothing: what `recorded` returns while recording is off."""

    def __init__(self) -> None:
        self.ended_at, self.event, self.on_device, self.has_failed = None, None, False, False
        self.is_waited_for = False

    def end(self) -> None:
        pass

    def run(self, start: Callable[[], dist.Work | None]) -> dist.Work | None:
        return start()

    def __enter__(self) -> Collective:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def explain(self, error: BaseException) -> None:
        pass


def recorded_collective() -> Collective | None:
    """Returns the innermost recorded collective that this thread is in."""
    return _thread.calls[-1] if _thread.calls else None


def message_tag(tag: int) -> int:
    """Returns `tag`, of 16 bits, with a hash above it of the collective that this thread is in.

    Messages of different collectives do not match then, but for one pair in 32,768 (15 bits): a rank out of step
    waits, instead of computing with another tensor of the same size.
    """
    call = recorded_collective()
    if call is None:
        return tag
    return (zlib.crc32(f"{call.kind}\0{call.what}\0{call.occurrence}".encode()) & 0x7FFF) << 16 | tag


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # The collectives that this thread is in, the outermost first. `Collective.__enter__` appends and `__exit__`
        # pops. A collective may be here twice, and on two threads at once: a lane enters its caller's.
        self.calls: list[Collective] = []


# Thread-local: each thread reads its own `calls`.
_thread = _ThreadState()
UNRECORDED = _Unrecorded()
"""The instance shared by all calls that are not recorded. It has no state."""


@dataclass(frozen=True)
class Position:
    """A rank's first unfinished collective in a group, else its last one."""

    name: str
    """Torch's name of the collective, as ``nccl:_all_gather_base``."""
    number: int
    """Number of the collective in its group, from 1."""
    is_over: bool
    """The collective has ended, or, under gloo, failed."""

    def __str__(self) -> str:
        return f"{self.name}, number {self.number}{' (over)' if self.is_over else ''}"


def positions() -> dict[str, Position]:
    """Returns this rank's position in each group by the group's name. The group of its last collective comes last.

    Empty where the backend or the build of torch has no recorder."""
    latest: dict[str, Position] = {}
    try:
        entries = flight_recorder()
    except Exception:  # it explains failures, and must not add another
        return latest
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = entry.get("process_group", ["?"])[0]
        before = latest.pop(group, None)
        if before is not None and not before.is_over:
            latest[group] = before
            continue
        # gloo never sets the state "completed": it retires entries that have ended in any way.
        is_over = entry.get("state") == "completed" or bool(entry.get("retired"))
        latest[group] = Position(entry.get("profiling_name", "?"), entry.get("collective_seq_id", 0), is_over)
    return latest
