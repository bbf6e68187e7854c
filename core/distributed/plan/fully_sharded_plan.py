"""The plan of a model whose parameters are sharded in flat buffers, as data; see `values`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .flat_plan import BucketPlan, BufferPlan, FlatPlan
from .values import GatheringPlan


@dataclass(frozen=True, kw_only=True)
class FlatUnitPlan:
    """A unit on flat buffers: modules whose parameters are whole while one of them runs."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    """Of each module below the model, whose own is empty."""
    buckets: tuple[tuple[int, int], ...]
    """Buffer and bucket of its memory, one for each kind of its parameters."""
    slot: int | None
    """The memory that it is gathered into, which units of its size use in turn; None where one rank has all."""
    is_freed: bool
    """Between its forward and backward another unit may be gathered into the same memory."""
    kept_among: int | None
    """Neighbouring ranks that then have all of it together, and gather it from each other; None where all ranks do."""
    is_needed_in_backward: bool
    """False where no backward of the unit reads a weight, as in an embedding."""


@dataclass(frozen=True, kw_only=True)
class FullyShardedPlan(GatheringPlan, FlatPlan):
    """The plan that `core.distributed.fully_sharded` carries out."""

    units: tuple[FlatUnitPlan, ...]
    """Children before parents; last the model, with what is in no unit before it."""
    shards_update_over_replicas: bool
    """Each optimizer instance updates a part of the shards, and gathers the others'."""
    precision: MixedPrecisionPolicy
    """Of the model; units cast their inputs too, its outputs are cast alone."""

    @property
    def num_updated_parts(self) -> int:
        return self.num_shards * (self.groups.num_replicas if self.shards_update_over_replicas else 1)

    @property
    def updated_part(self) -> int:
        if self.groups.replicate is None or not self.shards_update_over_replicas:
            return self.shard_index
        return self.shard_index * self.groups.num_replicas + self.groups.replicate.rank()

    @property
    def casts_parameters(self) -> bool:
        return self.precision.param_dtype is not None

    def buckets_of(self, unit: FlatUnitPlan) -> tuple[tuple[BufferPlan, BucketPlan], ...]:
        """Returns a unit's buckets, each with its buffer."""
        return tuple((self.buffers[index], self.buffers[index].buckets[number]) for index, number in unit.buckets)
