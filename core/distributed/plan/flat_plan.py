"""The plan of a model on flat buffers, as data; see `values`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import BucketLayout, FullParamLayout
from .values import ParamPlan, ShardingPlan, UnitPlan


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
