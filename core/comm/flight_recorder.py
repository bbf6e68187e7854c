"""Where ranks are in each process group by torch's flight recorder, which has collectives of any code.

NCCL's recorder has every collective. gloo's lacks messages between two ranks, and so direct exchanges (`gloo`).
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any

import torch.distributed as dist

from .._torch_compat import flight_recorder


@dataclass(frozen=True)
class Position:
    """A rank's first unfinished collective in a group, else its last one."""

    name: str
    """By torch, as ``nccl:_all_gather_base``."""
    number: int
    """Among the collectives of the group, from 1."""
    is_over: bool
    """It has ended, or, under gloo, failed."""

    def __str__(self) -> str:
        return f"{self.name}, number {self.number}{' (over)' if self.is_over else ''}"


def positions() -> dict[str, Position]:
    """Returns this rank's position in each group by the group's name, that of its last collective last; empty where
    the backend or the build of torch has no recorder."""
    found: dict[str, Position] = {}
    try:
        entries = flight_recorder()
    except Exception:  # it explains failures, and must not add another
        return found
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = entry.get("process_group", ["?"])[0]
        before = found.pop(group, None)
        if before is not None and not before.is_over:
            found[group] = before
            continue
        # gloo never sets the state "completed": it retires entries that have ended in any way.
        is_over = entry.get("state") == "completed" or bool(entry.get("retired"))
        found[group] = Position(entry.get("profiling_name", "?"), entry.get("collective_seq_id", 0), is_over)
    return found


def publish_positions(store: Any) -> None:
    """Writes this rank's positions into the store, for the others to read."""
    if found := positions():
        values = {group: astuple(position) for group, position in found.items()}
        store.set(_key(dist.get_rank()), json.dumps(values))


def positions_of(rank: int, store: Any) -> dict[str, Position]:
    """Returns what a rank of the world published last; empty if it never did, or if the store is gone."""
    try:
        found = json.loads(store.get(_key(rank))) if store.check([_key(rank)]) else {}
    except Exception:  # the store may have gone with the rank that held it
        return {}
    return {group: Position(*values) for group, values in found.items()}


def _key(rank: int) -> str:
    return f"shardstack/collectives/flight_recorder/{rank}"
