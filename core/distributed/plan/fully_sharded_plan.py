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
    """Name of each module in the model; empty for the model itself."""
    buckets: tuple[tuple[int, int], ...]
    """Indices of buffer and bucket, one pair for each dtype and device of the unit's parameters."""
    slot: int | None
    """Index of the slot that the unit is gathered into; units of equal size take turns with a slot. None if a single
    rank has all parameters."""
    is_freed: bool
    """Another unit may be gathered into the slot between this unit's forward and backward."""
    kept_among: int | None
    """Number of neighbouring ranks that together keep the whole unit between forward and backward, and gather it from
    each other; None for all ranks."""
    is_needed_in_backward: bool
    """False if the unit's backward reads no weight, as in an embedding."""


@dataclass(frozen=True, kw_only=True)
class FullyShardedPlan(GatheringPlan, FlatPlan):
    """The plan that `core.distributed.engine` carries out."""

    units: tuple[FlatUnitPlan, ...]
    """Children before parents; the last one is the model, with the parameters that are in no other unit."""
    shards_update_over_replicas: bool
    """Each optimizer instance updates a part of the shards, and gathers the other parts."""
    precision: MixedPrecisionPolicy
    """Dtypes of the model. Units cast their inputs; only the model casts outputs."""

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
