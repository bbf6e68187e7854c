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
    """A part of a flat buffer, which one collective reduces, and one gathers."""

    layout: BucketLayout

    @property
    def elements(self) -> int:
        """Padding included."""
        return self.layout.end - self.layout.start

    def places_in_shard(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Returns ``[start, end)`` of what a shard holds of each parameter, counted from the shard's beginning."""
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
    """Of what a rank keeps of parameters, which its optimizer updates."""
    gathered_dtype: torch.dtype
    """Of whole parameters, in which the model computes; another where they are cast to be gathered."""
    grad_dtype: torch.dtype
    """In which gradients add up and are reduced."""
    shard_grad_dtype: torch.dtype
    """Of the reduced gradient that a rank keeps; it may be wider where whole gradients are released."""
    holds_params: bool
    """Parameters are views of it; otherwise it holds gradients alone."""
    releases_grads: bool
    """Whole gradients are allocated by the bucket when they arrive, and released when they are reduced."""
    holds_experts: bool
    """Its parameters carry Megatron-LM's mark ``allreduce=False``."""
    accumulated_in_fp32: frozenset[str]
    """Names of parameters whose gradients add up over micro-batches in fp32 memory of their own."""
    is_trained: bool = True
    """False: frozen parameters, without gradients."""
    buckets: tuple[BucketPlan, ...]
    """In the order in which backward is expected to finish them."""


@dataclass(frozen=True, kw_only=True)
class FlatPlan(ShardingPlan):
    """The plan that `core.distributed.buffers` carries out."""

    buffers: tuple[BufferPlan, ...]
    reduction_order: tuple[tuple[int, int], ...]
    """Buffer and bucket, in the order in which buckets are reduced, equal on all ranks."""
    reduces_during_backward: bool
    """Buckets leave when their gradients are complete, rather than all at the end."""
    overlaps_grads: bool
    """Reductions run while backward goes on."""
    overlaps_params: bool
    """Parameters are gathered while forward runs."""
    averages_in_collective: bool
    adds_in_fp32: bool
    """Gradients travel in their own precision and are added in fp32."""

    @property
    def trained(self) -> dict[str, ParamPlan]:
        """The parameters with gradients in buffers, by name."""
        buckets = (bucket for buffer in self.buffers if buffer.is_trained for bucket in buffer.buckets)
        return {param.name: param for bucket in buckets for param in bucket.params}

    @property
    def layout(self) -> FullParamLayout:
        """The places of parameters alone."""
        return FullParamLayout(tuple(tuple(bucket.layout for bucket in buffer.buckets) for buffer in self.buffers))


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
