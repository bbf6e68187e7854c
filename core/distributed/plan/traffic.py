"""Computes the collectives of one unit in a step, calls and bytes. Pure arithmetic.

Counts the wrapper's collectives over the data-parallel group, on this rank. A unit that one forward uses several times
is gathered each time, but counts once here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and size that a unit starts in a step."""

    kind: Kind
    calls: int
    nbytes: int
    """Bytes of the whole tensor of one call: the output of an all-gather, the input of a reduction."""
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all calls, with an algorithm that sends nothing twice, such as a ring.

        ``(n - 1) / n`` of the tensor to gather or scatter it, twice that to all-reduce it.
        """
        passes = 2 if self.kind == "all-reduce" else 1
        return self.calls * passes * self.nbytes * (self.ranks - 1) // self.ranks


def unit_traffic(
    *,
    gathers: int,
    gathers_again: int = 0,
    reductions: int,
    gathered_bytes: int,
    reduced_bytes: int,
    num_shards: int,
    gathered_again_over: int = 0,
    num_replicas: int = 1,
    shared_update_bytes: int = 0,
) -> tuple[Traffic, ...]:
    """Returns the collectives of a unit.

    Args:
        gathers: all-gathers over all shards, but for those of `gathers_again`.
        gathers_again: those for backward, over `gathered_again_over` ranks, `num_shards` or fewer.
        gathered_bytes: bytes of all whole parameters, in the dtype and with the padding of the all-gather.
        reduced_bytes: bytes of all whole gradients, likewise; 0 if nothing is trained.
        num_shards: ranks that share a parameter, or the state of its optimizer.
        num_replicas: ranks with the same shard.
        shared_update_bytes: bytes of a shard, where replicas each update a part of it and gather the others'.
    """
    if gathered_again_over == num_shards:
        gathers, gathers_again = gathers + gathers_again, 0
    over_replicas: Kind = "reduce-scatter" if shared_update_bytes else "all-reduce"
    found = (
        Traffic("all-gather", gathers, gathered_bytes, num_shards),
        Traffic("all-gather", gathers_again, gathered_bytes, gathered_again_over),
        Traffic("reduce-scatter", reductions, reduced_bytes, num_shards),
        Traffic(over_replicas, reductions, reduced_bytes // num_shards, num_replicas),
        Traffic("all-gather", 1, shared_update_bytes, num_replicas),
    )
    return tuple(entry for entry in found if entry.calls and entry.nbytes and entry.ranks > 1)
