"""The plan of a model on flat buffers, as data; see `values`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .layout import BucketLayout, FullParamLayout
from .values import GatheringPlan, ParamPlan, ShardingPlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class BucketPlan(UnitPlan):
    """A part of a flat buffer: one collective reduces its gradients, and one gathers its parameters."""

    layout: BucketLayout

    @property
    def elements(self) -> int:
        """Number of elements, padding included."""
        return self.layout.end - self.layout.start

    def places_in_shard(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Returns each parameter's elements in a shard, ``[start, end)``, counted from the shard's beginning."""
        first = self.elements // (len(self.params[0].bounds) - 1) * shard
        places = []
        for param, (begin, _) in zip(self.params, self.layout.ranges, strict=True):
            start, end = (begin + bound - first for bound in param.bounds[shard : shard + 2])
            places.append((start, end) if start < end else (0, 0))
        return tuple(places)


@dataclass(frozen=True, kw_only=True)
class BufferPlan:
    """Flat memory for parameters of one dtype and device, and their gradients."""

    param_dtype: torch.dtype
    """Dtype of the parameters that a rank keeps and its optimizer updates."""
    gathered_dtype: torch.dtype
    """Dtype of gathered parameters, in which the model computes. Differs from `param_dtype` if they are cast."""
    grad_dtype: torch.dtype
    """Dtype in which gradients are accumulated and reduced."""
    shard_grad_dtype: torch.dtype
    """Dtype of the reduced gradient that a rank keeps; may be wider than `grad_dtype` if whole gradients are freed."""
    holds_params: bool
    """Parameters are views of the buffer; else it holds only gradients."""
    releases_grads: bool
    """A bucket's whole gradient is allocated when a gradient arrives, and freed when it is reduced."""
    holds_experts: bool
    """Its parameters carry Megatron-LM's mark ``allreduce=False``."""
    accumulated_in_fp32: frozenset[str]
    """Names of parameters whose gradients accumulate over micro-batches in separate fp32 tensors."""
    is_trained: bool = True
    """False if the parameters are frozen and have no gradients."""
    buckets: tuple[BucketPlan, ...]
    """In the order in which backward is expected to finish them."""


@dataclass(frozen=True, kw_only=True)
class FlatPlan(ShardingPlan):
    """The plan that `core.distributed.buffers` carries out."""

    buffers: tuple[BufferPlan, ...]
    reduction_order: tuple[tuple[int, int], ...]
    """Buffer and bucket, in the order in which buckets are reduced, equal on all ranks."""
    reduces_during_backward: bool
    """Buckets are sent when their gradients are complete, instead of all at the end."""
    overlaps_grads: bool
    """Reductions run while backward goes on."""
    overlaps_params: bool
    """Parameters are gathered while forward runs."""
    averages_in_collective: bool
    adds_in_fp32: bool
    """Gradients are sent in their own dtype and added in fp32."""

    @property
    def trained(self) -> dict[str, ParamPlan]:
        """The parameters with gradients in buffers, by name."""
        buckets = (bucket for buffer in self.buffers if buffer.is_trained for bucket in buffer.buckets)
        return {param.name: param for bucket in buckets for param in bucket.params}

    @property
    def layout(self) -> FullParamLayout:
        """The layout of all buffers."""
        return FullParamLayout(tuple(tuple(bucket.layout for bucket in buffer.buckets) for buffer in self.buffers))


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
    """The plan that `core.distributed.fully_sharded` carries out."""

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
