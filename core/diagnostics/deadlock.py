"""Notices within two seconds that two ranks wait for each other in different collectives, as where one skips a unit.

Nothing is added to a step: the listener of `core.comm.record` looks where the main thread is. A rank that waits in
collectives for half a second publishes which, and compares itself with the next rank of the group. Where neither has
begun what the other waits for, and neither has moved from one look to the next, it closes the group's connections. All
waits in the group then raise, and `out_of_step` explains the error. Under gloo alone: nothing else ends so.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..comm import gloo, record
from ..comm.call import Collective

PATIENCE_S = 0.5
"""Seconds that a rank waits in a collective before it compares itself with another."""

_FRAMES_SEARCHED = 12
_UNSENT_TAG = 0x5A50
"""Of a message that no rank sends. gloo closes a group's connections when the wait for it ends."""


class DeadlockWatch:
    """Compares this rank with another while both wait. Only the listener's thread uses it."""

    def __init__(self) -> None:
        # What the last look has seen: the calls that this rank waits in, and what the other rank has published. Empty
        # unless this rank waits. `look` sets it.
        self._seen: tuple[Any, ...] = ()
        # Number of looks, by which other ranks see that this one is alive; never reset.
        self._looks = 0

    def look(self) -> None:
        """Looks once. Closes the connections of this rank's calls if it and another rank wait for each other."""
        calls = record.awaited_calls() if _is_in_collectives(threading.main_thread()) else []
        if not calls or time.time() - min(call.started_at for call in calls) < PATIENCE_S:
            self._seen = ()
            return
        own, group = [_identity(call) for call in calls], calls[0].record
        self._looks += 1
        for call in calls:
            record.publish(call.record)
        record.write_to_store(f"waits/{dist.get_rank()}", [self._looks, own])
        other = group.ranks[(group.rank + 1) % group.num_ranks]
        waits = record.read_from_store(f"waits/{other}")
        before, self._seen = self._seen, (own, waits)
        if _own_deadlock() != own:
            if not before or None in (waits, before[1]) or (before[0], before[1][1]) != (own, waits[1]):
                return  # one of the two goes on
            if before[1] == waits or _has_begun_any(waits[1]) or any(_is_joined_by(other, call) for call in calls):
                return
            for rank, ends in ((other, waits[1]), (dist.get_rank(), own)):
                record.write_to_store(f"deadlock/{rank}", ends)
        for call in calls:
            _close_connections(call)


def is_deadlocked(call: Collective) -> bool:
    """Returns whether ranks are known to wait for each other, this one in `call`. They have published where."""
    return _identity(call) in (_own_deadlock() or ())


def _own_deadlock() -> Any:
    """Returns the calls in which this rank is known to wait for ever, or None."""
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
    begun = {of.group_name: [_identity(call) for call in list(of.calls)] for of in record.live_records()}
    return any(wait[0] not in begun or wait in begun[wait[0]] for wait in waits)


def _is_joined_by(rank: int, call: Collective) -> bool:
    """Returns whether a rank has begun the same call, or is not in its group."""
    if rank not in call.record.ranks:
        return True
    published = record.read_published(call.record, call.record.ranks.index(rank))
    identity = [call.occurrence, call.kind, call.what]
    return published is not None and any(entry[1:4] == identity for entry in published["calls"])


def _close_connections(call: Collective) -> None:
    group = record.group_of(call.record)
    if group is None or not gloo.is_gloo(group, torch.device("cpu")):
        return
    peer = (call.record.rank + 1) % call.record.num_ranks
    with contextlib.suppress(RuntimeError):  # the wait's, which is what it is for
        message = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_UNSENT_TAG)
        message.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]


record.watch_with(DeadlockWatch().look)
