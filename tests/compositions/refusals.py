"""What may be refused, and why: anything else that does not train is a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.compositions.composition import Composition


@dataclass(frozen=True)
class Refusal:
    """A reason for which compositions have to raise."""

    pattern: str
    """Of the message."""
    reason: str
    applies: Callable[[Composition], bool]


_KEEP_SHARDS = ("zero2", "zero3", "fsdp2")
"""Wrappers that keep no whole gradients."""


def _adds_sums(c: Composition) -> bool:
    """Whether gradients are added up, over tokens, or over ranks after their mean over replicas."""
    shares_a_weight = c.pipeline != "none" and c.embeddings == "tied" and c.trained in ("all", "without a layer")
    has_experts_apart = c.experts == "over ranks" and not c.is_fsdp2 and c.trained not in ("one norm", "adapters")
    # Norms of heads, and routers, are on every tensor-parallel rank for a part of the heads or of each expert.
    has_parts = c.shape.tp > 1 and (c.widths == "odd" or c.experts != "none")
    has_parts &= c.trained not in ("one norm", "adapters")
    return c.loss == "per token" or c.shape.sequence_parallel or has_parts or shares_a_weight or has_experts_apart


REFUSALS = (
    Refusal(
        "num_distributed_optimizer_instances is 2 without use_distributed_optimizer",
        "replicas shard nothing, so that there is nothing to replicate shards of",
        lambda c: c.wrapper == "ddp" and c.is_hybrid,
    ),
    Refusal(
        "keep_gathered_between_micro_batches='all' keeps every unit gathered for a whole step",
        "what is kept for the whole step cannot be resharded after a forward",
        lambda c: c.kept == "all" and (c.overrides != "none" or c.reshard == "two ranks"),
    ),
    Refusal(
        "is named by replicated, and an expert with ranks of its own",
        "an expert that each rank kept whole would be every rank's",
        lambda c: c.replicated == "an mlp" and c.experts == "over ranks",
    ),
    Refusal(
        "'selective' for a unit around .*, which is replicated",
        "torch counts operations of the hooks of a unit inside one that it recomputes",
        lambda c: c.is_fsdp2 and c.replicated != "nothing" and c.recompute == "products of units",
    ),
    Refusal(
        "force_all_reduce asks for whole gradients",
        "ranks that have sent their gradients to those who keep a shard have none",
        lambda c: c.whole_gradients == "yes" and c.wrapper in _KEEP_SHARDS,
    ),
    Refusal(
        "a backward added gradients after those of the step had been reduced",
        "what was reduced would be reduced again: a mean stays as it is, a shard and a sum do not",
        lambda c: c.zeroes == "never" and (c.wrapper in ("zero1", "zero2", "zero3") or _adds_sums(c)),
    ),
    Refusal(
        "none of the 1 trained parameters is a matrix of a hidden layer",
        "there is nothing for Muon to update",
        lambda c: c.optimizer == "muon" and c.trained == "one norm",
    ),
    Refusal(
        "is not contiguous in memory, as FSDP2 needs it",
        "torch cuts rows of what lies in rows",
        lambda c: c.is_fsdp2 and c.memory == "strided",
    ),
    Refusal(
        r"inside whole_parameters\(\), where the model shows copies of them",
        "the average would be written into shards, and the model would show whole copies of before",
        lambda c: c.wrapper == "zero3" and c.evaluates == "the average inside whole_parameters",
    ),
)


def refusal_of(composition: Composition) -> Refusal | None:
    parts = (composition,) if composition.continues == "no" else composition.parts
    return next((r for r in REFUSALS for part in parts if r.applies(part)), None)
