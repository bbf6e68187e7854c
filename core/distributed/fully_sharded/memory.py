"""Owns a rank's shards of parameters, and the memory of their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...comm.collectives import Allocate
from ...host_memory import transient_memory
from ..buffers.bucket import Bucket
from ..buffers.flat_memory import FlatMemory
from ..buffers.grad_memory import GradMemory
from ..plan import BufferPlan, PiecePlan

_GRAD_SLOTS = 2
"""Gradient tensors kept per size: one is filled while the other is reduced."""


class ShardedBuffer(FlatMemory):
    """This rank's shards of all parameters of one dtype and device, and the buckets that reduce their gradients.

    Args:
        plan: the plan of this buffer.
        params: the model's parameters, by name.
        device: the device that the model computes on.
        num_shards: number of ranks that shard the parameters.
        updated_parts: number of equal parts, each updated by one rank, which keeps its gradient; and the index of this
            rank's part.
        offloads: keep shards in host memory.
        pins_memory: pin that memory, so that copies to the device overlap with computation.
        allocate: allocates the memory of whole gradients.

    Attributes:
        shards: `[numel / num_shards]`, owns this rank's shards of all buckets, one after the other. It is a single
            tensor, so that its version counts every write to a shard.
        buckets: the buckets of the gradients; empty if the parameters are frozen.
    """

    def __init__(
        self,
        plan: BufferPlan,
        params: Mapping[str, nn.Parameter],
        device: torch.device,
        *,
        num_shards: int,
        updated_parts: tuple[int, int],
        offloads: bool = False,
        pins_memory: bool = False,
        allocate: Allocate = transient_memory,
    ) -> None:
        self.names = [param.name for bucket in plan.buckets for param in bucket.params]
        self.params = [params[name] for name in self.names]
        self.param_dtype, self.gathered_dtype, self.device = plan.param_dtype, plan.gathered_dtype, device
        self.grad_dtype, self.shard_grad_dtype = plan.grad_dtype, plan.shard_grad_dtype
        self.num_grad_shards, self.grad_shard_index = updated_parts
        self._num_param_shards = num_shards
        self.accumulated_in_fp32 = plan.accumulated_in_fp32
        self.param_data = None  # units' slots have the whole parameters
        numel = plan.buckets[-1].layout.end
        self.grad_data: Tensor | None = None  # as `FlatMemory` says; set below, then fixed
        if plan.is_trained and not plan.releases_grads:
            self.grad_data = torch.zeros(numel, dtype=plan.grad_dtype, device=device)
        self.shard_device = torch.device("cpu") if offloads else device
        self.pins_memory = pins_memory
        self.shards = self.zeros_for_shards(numel // num_shards, plan.param_dtype)
        sizes = Counter(bucket.elements for bucket in plan.buckets)
        self.grad_memory = GradMemory(
            plan.grad_dtype,
            device,
            most_kept={size: _GRAD_SLOTS for size, count in sizes.items() if count > 1},
            allocate=allocate,
        )
        self.buckets: list[Bucket] = []
        for planned in plan.buckets if plan.is_trained else ():
            bucket = Bucket(self, planned.layout)
            bucket.local_param_shard = self.shard_of(planned)
            self.buckets.append(bucket)

    def shard_of(self, bucket: PiecePlan) -> Tensor:
        """Returns `[elements / num_shards]`, this rank's shard of a bucket's parameters."""
        start, end = bucket.layout.start, bucket.layout.end
        return self.shards[start // self._num_param_shards : end // self._num_param_shards]
