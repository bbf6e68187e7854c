"""Explains ranks out of step: compares what a rank whose wait failed and the other ranks have called.

A collective that not all ranks join ends in the backend's time limit ("Timed out waiting 1800000ms for recv
operation") or, when a rank has died, in a closed connection. gloo raises that where the result is waited for. Under
NCCL the host waits only where it reads a step's result; there `core.comm.host_read` looks at how long collectives have
been running on the device, and raises before torch's watchdog would end the process.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist

from .._torch_compat import flight_recorder
from ..comm.call import Collective, explain_failures_with
from ..comm.record import MOST_ASKING, ask_other_ranks, is_recording, latest_collective, may_ask_other_ranks
from ..errors import OutOfStepError, ShardstackError
from ..text import listed, rank_list, readable_bytes
from .out_of_memory import is_out_of_memory

_BACKEND_FAILED = re.compile(
    r"timed out waiting \d+ms|timeout caused pair closure|connection (closed|reset) by peer|broken pipe|gloo/|nccl",
    re.IGNORECASE,
)


_NONE_BEHIND = "the network between the ranks, and at each rank (a paused process, a disk that does not answer)"


def is_failure_of_backend(error: BaseException) -> bool:
    """Returns whether a backend raises this error when ranks do not meet in a collective."""
    if isinstance(error, ShardstackError) or not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or _BACKEND_FAILED.search(str(error)) is not None


def raise_out_of_step(error: BaseException, call: Collective | None = None) -> None:
    """Explains the failure of a collective; returns if `error` is something else.

    Args:
        call: the collective; None for one that this library does not record.

    Raises:
        OutOfStepError: from `error`.
    """
    if not is_failure_of_backend(error):
        return
    if call is None:
        raise OutOfStepError(_message_without_record(error)) from error
    raise OutOfStepError(_message(error, call)) from error


def _message_without_record(error: BaseException) -> str:
    if is_recording():
        before = latest_collective()
        after = f", after {_name(before)} in one of {before.record.num_ranks} ranks" if before is not None else ""
        which = f"a collective that was not the wrapper's{after}"
    else:
        which = "a collective, and SHARDSTACK_RECORD_COLLECTIVES=0 keeps no record that names it"
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()} failed in {which}."
        f"{_flight_recorder_says(unfinished=False)} Every rank must make the same calls in the same order; look at "
        f"what the ranks do there. The backend said: {_first_line(error)}"
    )


def _message(error: BaseException, call: Collective) -> str:
    record = call.record
    waited = time.time() - call.started_at
    if not may_ask_other_ranks():
        return (
            f"rank {record.ranks[record.rank]} of {dist.get_world_size()} waited {waited:.0f} s for "
            f"{_name(call)}, its call {call.number} in this group, which did not complete; {MOST_ASKING} ranks failed "
            f"before it, and their messages say where the others are. The backend said: {_first_line(error)}"
        )
    ask_other_ranks()
    others = [rank for rank in range(record.num_ranks) if rank != record.rank]
    states: dict[str, list[int]] = defaultdict(list)
    for rank in others:
        states[_state_of(record.read(rank), call)].append(record.ranks[rank])
    said = listed([f"{rank_list(ranks)} {state}" for state, ranks in states.items()])
    behind = [rank for state, ranks in states.items() if not state.startswith("waited in the same") for rank in ranks]
    look_at = rank_list(sorted(behind)) if behind else _NONE_BEHIND
    return (
        f"rank {record.ranks[record.rank]} of {dist.get_world_size()} waited {waited:.0f} s for {_name(call)}, "
        f"its call {call.number} in this group, which did not complete: {said}. Every rank must make the same "
        f"sequence of forwards, backwards and steps; look at {look_at} for a skipped micro-batch, another branch, an "
        f"endless wait for data or a crash.{_flight_recorder_says(unfinished=True)} "
        f"The backend said: {_first_line(error)}"
    )


def _state_of(published: dict[str, Any] | None, call: Collective) -> str:
    """Describes what a rank has published, as the part of a message that follows its number."""
    if published is None:
        return "has not answered: it has called nothing in this group, is paused, or has ended"
    calls = [_Published(entry) for entry in published["calls"]]
    same = next((c for c in calls if c.identity == (call.kind, call.what, call.occurrence)), None)
    if same is not None:
        return "waited in the same" if same.ended_at is None else "was through with it"
    number = published["num_calls"]
    if not calls:
        return "has called nothing in this group"
    last = calls[-1]
    distance = call.number - number
    pace = f", {distance} fewer than this rank" if distance > 0 else ""
    if last.ended_at is None:
        return f"waited in {last.name} instead, its call {number}{pace}"
    return f"never came: it was in no collective, the last was {last.name}, its call {number}{pace}"


class _Published:
    def __init__(self, entry: list[Any]) -> None:
        _, occurrence, kind, what, num_bytes, _, self.ended_at = entry
        self.identity = (kind, what, occurrence)
        self.name = _text(kind, what, occurrence, num_bytes)


def _name(call: Collective) -> str:
    return _text(call.kind, call.what, call.occurrence, call.num_bytes)


def _text(kind: str, what: str, occurrence: int, num_bytes: int) -> str:
    size = f" ({readable_bytes(num_bytes)})" if num_bytes else ""
    return f"{kind} {occurrence} of {what}{size}"


def _flight_recorder_says(unfinished: bool) -> str:
    """Says where this rank is in torch's flight recorder: at the first unfinished entry, or the last; "" without one.

    gloo leaves entries "scheduled" for ever, but retires those that have ended in any way.
    """
    entries = flight_recorder()
    waiting = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
    last = next(iter(waiting or ([] if unfinished else entries[-1:])), None)
    if last is None:
        return ""
    return (
        f" Torch's flight recorder is here at {last.get('profiling_name')}, number "
        f"{last.get('collective_seq_id')} of group {' '.join(last.get('process_group', ['?'])[:1])}."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


explain_failures_with(raise_out_of_step)
