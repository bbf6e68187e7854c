"""Explains ranks out of step: compares what a rank whose wait failed and the other ranks have called.

A collective that not all ranks join ends in the backend's time limit ("Timed out waiting 1800000ms for recv
operation") or, when a rank has died, in a closed connection. gloo raises that where the result is waited for. Under
NCCL the host waits only where it reads a step's result; there `shardstack.comm.lane` looks at how long collectives
have been running on the device, and raises before torch's watchdog would end the process.

Under gloo alone, two ranks that wait for each other in different collectives, as where one skips a unit, are noticed
within two seconds: nothing else ends so. Nothing is added to a step: the listener of `shardstack.comm.record` looks
where the main thread is. A rank that waits in collectives for half a second publishes which, and compares itself with
the next rank of the group. Where neither has begun what the other waits for, and neither has moved from one look to
the next, it closes the group's connections. All waits in the group then raise.

Torch's flight recorder comes first where it has the collective that failed, as under NCCL: it has the collectives of
other code too, and says which rank is behind. Our record adds what each was for.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..base.errors import OutOfStepError, ShardstackError
from ..base.memory_categories import is_out_of_memory
from ..base.text import first_line, join_parts, rank_list, readable_bytes, texts_by_rank
from . import gloo, record
from .call import Collective, Position, positions

_BACKEND_FAILED = re.compile(
    r"timed out waiting \d+ms|timeout caused pair closure|connection (closed|reset) by peer|broken pipe|socket closed"
    r"|op\.preamble\.length|connectfullmesh failed|collective operation timeout|communicator was aborted"
    r"|ncclremoteerror",
    re.IGNORECASE,
)
"""What gloo, and NCCL's watchdog, say when a rank does not come, or comes with a tensor of another size. Other
failures, as of an address in use, have other causes."""


_NONE_BEHIND = "the network between the ranks, and at each rank (a paused process, a disk that does not answer)"


def is_failure_of_backend(error: BaseException) -> bool:
    """Returns whether a backend raises this error when ranks do not meet in a collective."""
    if isinstance(error, ShardstackError) or not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or _BACKEND_FAILED.search(str(error)) is not None


_is_deferred: list[bool] = []
"""Holds an entry while failures of collectives are not explained. `defer_explanations` sets and clears it."""


def defer_explanations(is_deferred: bool) -> None:
    """Sets whether failures of collectives are raised as they are: where a lost rank is their likely cause, which
    a launcher names, nobody waits for the answers of others."""
    _is_deferred[:] = [True] if is_deferred else []


def raise_out_of_step(error: BaseException, call: Collective | None = None) -> None:
    """Explains the failure of a collective. Returns if `error` is something else.

    Args:
        call: the collective; None for one that this library does not record.

    Raises:
        OutOfStepError: from `error`.
    """
    if _is_deferred or not is_failure_of_backend(error):
        return
    raise OutOfStepError(_message_without_record(error) if call is None else _message(error, call)) from error


def _message_without_record(error: BaseException) -> str:
    if record.is_recording():
        before = record.latest_collective()
        after = f", after {_name(before)} in one of {before.record.num_ranks} ranks" if before is not None else ""
        which = f"a collective that was not the wrapper's{after}"
    else:
        which = "a collective, and SHARDSTACK_RECORD_COLLECTIVES=0 keeps no record that names it"
    where, look_at = "", "what the ranks do there"
    if own := positions():
        group = next(reversed(own))
        at: dict[int, Position] = {}
        if record.is_recording() and record.may_ask_other_ranks():
            record.ask_other_ranks()
            positions_of = {rank: record.flight_recorder_of(rank).get(group) for rank in range(dist.get_world_size())}
            at = {rank: position for rank, position in positions_of.items() if position is not None}
        places, behind = _by_recorder(at, own[group])
        where, look_at = f"{places[0].upper()}{places[1:]}. ", rank_list(behind) if behind else look_at
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()} failed in {which}. {where}Every rank must make the same "
        f"calls in the same order; look at {look_at}. The backend said: {first_line(error)}"
    )


def _message(error: BaseException, call: Collective) -> str:
    group = call.record
    waited_s = time.time() - call.started_at
    if not record.may_ask_other_ranks():
        return (
            f"rank {group.ranks[group.rank]} of {dist.get_world_size()} waited {waited_s:.0f} s for "
            f"{_name(call)}, its call {call.number} in this group, which did not complete; {record.MOST_ASKING} ranks "
            f"failed before it, and their messages say where the others are. The backend said: {first_line(error)}"
        )
    if _identity(call) not in (_own_deadlock() or ()):
        record.ask_other_ranks()
    others = [rank for rank in range(group.num_ranks) if rank != group.rank]
    states = {group.ranks[rank]: _state_of(record.read_published(group, rank), call) for rank in others}
    states_text = join_parts(texts_by_rank(((rank, state.text) for rank, state in states.items()), " "))
    behind = [rank for rank, state in states.items() if state.is_behind]
    by_torch, own = "", positions().get(group.group_name)
    if own is not None and not own.is_over:
        places, first = _by_recorder({r: record.flight_recorder_of(r).get(group.group_name) for r in group.ranks}, own)
        by_torch, behind = f" ({places})", first or behind
    look_at = rank_list(sorted(behind)) if behind else _NONE_BEHIND
    return (
        f"rank {group.ranks[group.rank]} of {dist.get_world_size()} waited {waited_s:.0f} s for {_name(call)}, "
        f"its call {call.number} in this group, which did not complete{by_torch}: "
        f"{states_text}. Every rank must make the same sequence of forwards, backwards and steps; look at {look_at} "
        f"for a skipped micro-batch, another branch, an endless wait for data or a crash. {_advice(call)}"
        f"The backend said: {first_line(error)}"
    )


def _advice(call: Collective) -> str:
    if not call.what.startswith(("the parameters of unit", "the gradients of unit")):
        return ""
    return (
        "Where ranks skip this unit, set gather_skipped_units, name its parameters in replicated, or call it with a "
        "dummy input on all. "
    )


def _by_recorder(at: Mapping[int, Position | None], own: Position) -> tuple[str, list[int]]:
    """Compares positions of ranks in a group with this rank's own.

    Returns:
        The comparison, as part of a sentence; and the ranks that have not come to the collective that this rank waits
        in; no ranks where it is over: gloo's recorder lacks direct exchanges, and retires a collective that fails.
    """
    position_of = sorted({**at, dist.get_rank(): own}.items())
    places = join_parts(texts_by_rank(((rank, str(position or "none")) for rank, position in position_of), " at "))
    behind = [rank for rank, position in position_of if position is None or position.number < own.number]
    return f"torch's flight recorder has {places}", [] if own.is_over else behind


class _State(NamedTuple):
    """Where a rank is, compared with the collective that failed."""

    text: str
    """The part of a message that follows the rank's number."""
    is_behind: bool
    """The rank has not come to the collective, or waits in another one."""


def _state_of(record_there: dict[str, Any] | None, call: Collective) -> _State:
    """Compares what a rank has published with the collective that failed."""
    if record_there is None:
        return _State("has not answered: it has called nothing in this group, is paused, or has ended", True)
    calls = [_Published(entry) for entry in record_there["calls"]]
    same = next((c for c in calls if c.identity == (call.kind, call.what, call.occurrence)), None)
    if same is not None:
        return _State("waited in the same" if same.ended_at is None else "was through with it", False)
    if not calls:
        return _State("has called nothing in this group", True)
    waiting = next((c for c in calls if c.ended_at is None and not c.has_failed), None)
    if waiting is None and calls[-1].has_failed:
        waiting = calls[-1]  # the backend has given up, and the rank has its message
    here = waiting or calls[-1]
    distance = call.number - here.number
    if waiting is None:
        pace = f", {distance} fewer than this rank" if distance > 0 else ""
        return _State(
            f"never came: it was in no collective, the last was {here.name}, its call {here.number}{pace}", True
        )
    pace = f", {abs(distance)} {'fewer' if distance > 0 else 'more'} than this rank" if distance else ""
    return _State(f"waited in {here.name} instead, its call {here.number}{pace}", True)


class _Published:
    def __init__(self, entry: list[Any]) -> None:
        self.number, occurrence, kind, what, num_bytes, _, self.ended_at, self.has_failed = entry
        self.identity = (kind, what, occurrence)
        self.name = _text(kind, what, occurrence, num_bytes)


def _name(call: Collective) -> str:
    return _text(call.kind, call.what, call.occurrence, call.num_bytes)


def _text(kind: str, what: str, occurrence: int, num_bytes: int) -> str:
    size = f" ({readable_bytes(num_bytes)})" if num_bytes else ""
    return f"{kind} {occurrence} of {what}{size}"


PATIENCE_S = 0.5
"""Seconds that a rank waits in a collective before it compares itself with another."""

_FRAMES_SEARCHED = 12
_UNSENT_TAG = 0x5A50
"""Tag of a message that no rank sends. gloo closes a group's connections when the wait for it ends."""


class DeadlockWatch:
    """Compares this rank with another while both wait. Only the listener's thread uses it."""

    def __init__(self) -> None:
        # What the last look has seen: the calls that this rank waits in, and what the other rank has published. Empty
        # unless this rank waits. `look` sets it.
        self._last_wait: tuple[Any, ...] = ()
        # Number of looks, by which other ranks see that this one is alive.
        self._looks = 0

    def look(self) -> None:
        """Looks once. Closes the connections of this rank's calls if it and another rank wait for each other."""
        calls = record.awaited_calls() if _is_in_collectives(threading.main_thread()) else []
        if not calls or time.time() - min(call.started_at for call in calls) < PATIENCE_S:
            self._last_wait = ()
            return
        own, group = [_identity(call) for call in calls], calls[0].record
        self._looks += 1
        for call in calls:
            record.publish(call.record)
        record.write_to_store(f"waits/{dist.get_rank()}", [self._looks, own])
        other = group.ranks[(group.rank + 1) % group.num_ranks]
        waits = record.read_from_store(f"waits/{other}")
        before, self._last_wait = self._last_wait, (own, waits)
        if _own_deadlock() != own:
            if not before or None in (waits, before[1]) or (before[0], before[1][1]) != (own, waits[1]):
                return  # one of the two goes on
            if before[1] == waits or _has_begun_any(waits[1]) or any(_is_joined_by(other, call) for call in calls):
                return
            for rank, ends in ((other, waits[1]), (dist.get_rank(), own)):
                record.write_to_store(f"deadlock/{rank}", ends)
        for call in calls:
            _close_connections(call)


def _own_deadlock() -> Any:
    """Returns the calls in which this rank is known to wait for ever, or None. All such ranks have published where."""
    return record.read_from_store(f"deadlock/{dist.get_rank()}")


def _is_in_collectives(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    for _ in range(_FRAMES_SEARCHED):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).startswith(gloo.__package__):
            return True
        frame = frame.f_back
    return False


def _identity(call: Collective) -> list[Any]:
    return [call.record.group_name, call.kind, call.what, call.occurrence]


def _has_begun_any(waits: list[list[Any]]) -> bool:
    """Returns whether this rank has begun one of these calls, or does not know a group of them."""
    own_calls = {of.group_name: [_identity(call) for call in list(of.calls)] for of in record.live_records()}
    return any(wait[0] not in own_calls or wait in own_calls[wait[0]] for wait in waits)


def _is_joined_by(rank: int, call: Collective) -> bool:
    """Returns whether a rank has begun the same call, or is not in its group."""
    if rank not in call.record.ranks:
        return True
    record_there = record.read_published(call.record, call.record.ranks.index(rank))
    identity = [call.occurrence, call.kind, call.what]
    return record_there is not None and any(entry[1:4] == identity for entry in record_there["calls"])


def _close_connections(call: Collective) -> None:
    group = record.group_of(call.record)
    if group is None or not gloo.is_gloo(group, torch.device("cpu")):
        return
    peer = (call.record.rank + 1) % call.record.num_ranks
    with contextlib.suppress(RuntimeError):  # the wait's, which is what it is for
        message = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_UNSENT_TAG)
        message.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
