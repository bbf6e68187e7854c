"""Computes the traffic of one unit in a step, calls and bytes, from its settings.

Counts the wrapper's collectives over the data-parallel group, on this rank. A unit that one forward uses several times
is gathered each time, but counts once here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class StepPlan:
    """The settings of a step that decide its traffic."""

    num_microbatches: int = 1
    reduces_every_micro_batch: bool = False


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


def sharded_traffic(
    step: StepPlan,
    *,
    gathered_bytes: int,
    reduced_bytes: int,
    shard_size: int,
    num_replicas: int = 1,
    gathered_again_over: int,
    is_kept: bool = False,
    shared_update_bytes: int = 0,
) -> tuple[Traffic, ...]:
    """Returns the collectives of a unit with sharded parameters (ZeRO-3).

    Args:
        gathered_bytes: bytes of all whole parameters, in the dtype and with the padding of the all-gather.
        reduced_bytes: bytes of all whole gradients, likewise; 0 if nothing is trained.
        gathered_again_over: ranks among which backward gathers the unit once more, `shard_size` or fewer; 0 if its
            parameters are still whole, or no backward reads them.
        is_kept: parameters that are gathered when a micro-batch ends stay gathered for the next one.
        shared_update_bytes: bytes of a shard, where replicas each update a part of it and gather the others'.
    """
    gathers, reductions = 1 if is_kept else step.num_microbatches, _num_reductions(step) if reduced_bytes else 0
    again = step.num_microbatches if gathered_again_over else 0
    if gathered_again_over == shard_size:
        gathers, again = gathers + again, 0
    return _drop_idle(
        Traffic("all-gather", gathers, gathered_bytes, shard_size),
        Traffic("all-gather", again, gathered_bytes, gathered_again_over),
        Traffic("reduce-scatter", reductions, reduced_bytes, shard_size),
        Traffic(
            "reduce-scatter" if shared_update_bytes else "all-reduce",
            reductions,
            reduced_bytes // shard_size,
            num_replicas,
        ),
        Traffic("all-gather", int(shared_update_bytes > 0), shared_update_bytes, num_replicas),
    )


def bucket_traffic(
    step: StepPlan, *, param_bytes: int, grad_bytes: int, shard_size: int | None, num_replicas: int
) -> tuple[Traffic, ...]:
    """Returns the collectives of a bucket of a flat buffer.

    Args:
        param_bytes: bytes of its whole parameters.
        grad_bytes: bytes of its whole gradients.
        shard_size: ranks that shard optimizer state (ZeRO-1, ZeRO-2); None without sharding.
        num_replicas: ranks with the same shard, or with the same whole bucket.
    """
    if shard_size is None:
        return _drop_idle(Traffic("all-reduce", 1, grad_bytes, num_replicas))
    reductions = _num_reductions(step)
    return _drop_idle(
        Traffic("all-gather", 1, param_bytes, shard_size),
        Traffic("reduce-scatter", reductions, grad_bytes, shard_size),
        Traffic("all-reduce", reductions, grad_bytes // shard_size, num_replicas),
    )


def _num_reductions(step: StepPlan) -> int:
    return step.num_microbatches if step.reduces_every_micro_batch else 1


def _drop_idle(*traffic: Traffic) -> tuple[Traffic, ...]:
    return tuple(entry for entry in traffic if entry.calls and entry.ranks > 1)
