"""Gives each restart of a job a separate store.

``torchrun`` reuses one store for all restarts (pytorch/pytorch#135712): without this, ranks would read addresses of
the previous one, where nothing listens any more, and wait. Its count of restarts cannot name a restart (a *round*),
because node agents that follow another one's failure do not count it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but left out of __all__

from ..errors import ParallelStateError

_LEADER = "shardstack/round"
_POLL_S = 0.02


def store_of_round(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Returns `store` under a prefix that no earlier round has used. All ranks of a round call it once.

    Rank 0 proposes a name; the others answer with names of their own; it closes the round by listing these. What an
    earlier round has left lists other names, so that no rank takes it for its own.

    Raises:
        ParallelStateError: another rank did not come in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(_LEADER, own)
        names = [_wait_for(store, f"{own}/{other}", other, deadline) for other in range(1, num_ranks)]
        store.set(f"{own}/members", ",".join(names))
        return PrefixStore(own, store)
    while time.monotonic() < deadline:
        if store.check([_LEADER]):
            leader = store.get(_LEADER).decode()
            store.set(f"{leader}/{rank}", own)
            members = f"{leader}/members"
            if store.check([members]) and own in store.get(members).decode().split(","):
                return PrefixStore(leader, store)
        time.sleep(_POLL_S)
    raise _absent(0)


def _wait_for(store: Store, key: str, rank: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        if store.check([key]):
            return store.get(key).decode()
        time.sleep(_POLL_S)
    raise _absent(rank)


def _absent(rank: int) -> ParallelStateError:
    return ParallelStateError(
        f"rank {rank} did not join the process group in time; look at its output, or raise the limit "
        "(--distributed-timeout-minutes)"
    )
