"""Calls and bytes of the collectives of one unit in a step, from its settings alone.

These are the wrapper's own collectives over the data-parallel group, on this rank. A unit that one forward uses
several times is gathered as often; here it counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class StepPlan:
    """What of a step decides its traffic."""

    num_microbatches: int = 1
    reduces_every_micro_batch: bool = False


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and size that a unit starts in a step."""

    kind: Kind
    calls: int
    nbytes: int
    """Of the whole tensor of one call: what an all-gather brings together, what a reduction adds."""
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """What this rank sends in all calls, by an algorithm that sends nothing twice, as a ring does.

        ``(n - 1) / n`` of the tensor to gather or to scatter it, twice that to all-reduce it.
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
) -> tuple[Traffic, ...]:
    """Collectives of a unit whose parameters are sharded (ZeRO-3).

    Args:
        gathered_bytes: all parameters whole, in the dtype and with the padding of the all-gather.
        reduced_bytes: all gradients whole, likewise; 0 where nothing is trained.
        gathered_again_over: ranks among which backward gathers the unit once more, `shard_size` or fewer; 0 where its
            parameters are whole still, or no backward reads them.
        is_kept: what is gathered when a micro-batch ends stays so for the next one.
    """
    gathers, reductions = 1 if is_kept else step.num_microbatches, _num_reductions(step) if reduced_bytes else 0
    again = step.num_microbatches if gathered_again_over else 0
    if gathered_again_over == shard_size:
        gathers, again = gathers + again, 0
    return _drop_idle(
        Traffic("all-gather", gathers, gathered_bytes, shard_size),
        Traffic("all-gather", again, gathered_bytes, gathered_again_over),
        Traffic("reduce-scatter", reductions, reduced_bytes, shard_size),
        Traffic("all-reduce", reductions, reduced_bytes // shard_size, num_replicas),
    )


def bucket_traffic(
    step: StepPlan, *, param_bytes: int, grad_bytes: int, shard_size: int | None, num_replicas: int
) -> tuple[Traffic, ...]:
    """Collectives of a bucket of a flat buffer.

    Args:
        param_bytes: its parameters, whole.
        grad_bytes: its gradients, whole.
        shard_size: ranks among which optimizer state is cut (ZeRO-1, ZeRO-2); None where nothing is.
        num_replicas: ranks that hold the same, whole or shard.
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
