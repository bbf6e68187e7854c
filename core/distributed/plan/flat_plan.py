"""The plan of a model on flat buffers, as data; see `values`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import BucketLayout, FullParamLayout
from .values import ParamPlan, ShardingPlan, UnitPlan


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
    """The plan that `core.distributed.engine` carries out."""

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
    lends_gradients: bool
    """Layers compute gradients in the memory of buckets (`GradSlot.lend`)."""
    layers_add_gradients: bool
    """Layers add to ``main_grad`` themselves, as Megatron-LM's do with their fused kernel."""
    adds_in_fp32: bool
    """Gradients are sent in their own dtype and added in fp32."""
    finishes_in_backward: bool = False
    """Each backward outside `no_sync` finishes gradients, as under torch's DDP, and leaves them in ``param.grad``."""

    @property
    def trained(self) -> dict[str, ParamPlan]:
        """The parameters with gradients in buffers, by name."""
        buckets = (bucket for buffer in self.buffers if buffer.is_trained for bucket in buffer.buckets)
        return {param.name: param for bucket in buckets for param in bucket.params}

    @property
    def layout(self) -> FullParamLayout:
        """The layout of all buffers."""
        return FullParamLayout(tuple(tuple(bucket.layout for bucket in buffer.buckets) for buffer in self.buffers))
