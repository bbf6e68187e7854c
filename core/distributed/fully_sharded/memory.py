"""Owns a rank's shards of parameters, and the memory of their gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...comm.memory import Allocate
from ...host_memory import passing_memory
from ..buffers.bucket import Bucket
from ..buffers.flat_memory import FlatMemory
from ..plan import BucketPlan, BufferPlan

_GRAD_SLOTS = 2
"""Of one size: one that is filled while the other is reduced."""


class ShardedBuffer(FlatMemory):
    """This rank's shards of all parameters of one kind, and the buckets in which their gradients are reduced.

    Args:
        plan: what it holds.
        params: the model's, by name.
        device: where the model computes.
        num_shards: ranks that share the parameters.
        updated_parts: number of equal parts, each updated by one rank, which keeps its gradient; and this rank's part.
        offloads: shards are in the host's memory.
        pins_memory: in a part of it that the device copies from while it computes.
        allocate: of the memory of whole gradients.
        keeps_grads: whole gradients of several micro-batches wait for each other, so that all of their memory goes
            round. To free and allocate it costs more than to add it up.

    Attributes:
        shards: `[numel / num_shards]`, this rank's shard of each bucket, one after the other: one tensor, so that its
            version counts every write to a shard.
        buckets: of the gradients; none where parameters are frozen.
    """

    reuses_grads = True

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
        allocate: Allocate = passing_memory,
        keeps_grads: bool = False,
    ) -> None:
        self.names = [param.name for bucket in plan.buckets for param in bucket.params]
        self.params = [params[name] for name in self.names]
        self.param_dtype, self.gathered_dtype, self.device = plan.param_dtype, plan.gathered_dtype, device
        self.grad_dtype, self.shard_grad_dtype = plan.grad_dtype, plan.shard_grad_dtype
        self.num_shards, self.shard_index = updated_parts
        self._num_param_shards, self._allocate = num_shards, allocate
        self.accumulated_in_fp32 = plan.accumulated_in_fp32
        self.param_data = None  # units' slots have the whole parameters
        numel = plan.buckets[-1].layout.end
        self.grad_data: Tensor | None = None  # as `FlatMemory` says; set below, for good
        if plan.is_trained and not plan.releases_grads:
            self.grad_data = torch.zeros(numel, dtype=plan.grad_dtype, device=device)
        self.shard_device = torch.device("cpu") if offloads else device
        self.shards = torch.zeros(
            numel // num_shards, dtype=plan.param_dtype, device=self.shard_device, pin_memory=pins_memory
        )
        # Unused memory for whole gradients, by its number of elements: of each size that several units have, as long
        # as the model is wrapped. `take_grads` takes it for a unit's first gradient, `give_back_grads` returns it when
        # that is reduced; both on the thread that runs backward.
        sizes = Counter(bucket.elements for bucket in plan.buckets)
        self._grad_slots: dict[int, list[Tensor]] = {
            size: [] for size, count in sizes.items() if count > 1 or keeps_grads
        }
        # Of one size; what is given back beyond them is freed.
        self._most_grad_slots = math.inf if keeps_grads else _GRAD_SLOTS
        self.buckets: list[Bucket] = []
        for planned in plan.buckets if plan.is_trained else ():
            bucket = Bucket(self, planned.layout)
            bucket.local_param_shard = self.shard_of(planned)
            self.buckets.append(bucket)

    @property
    def kept_grad_memory(self) -> list[Tensor]:
        """The memory for whole gradients that no unit uses at this moment."""
        return [memory for kept in self._grad_slots.values() for memory in kept]

    def take_grads(self, numel: int) -> Tensor:
        kept = self._grad_slots.get(numel)
        return kept.pop() if kept else self._allocate(numel, self.grad_dtype, self.device)

    def give_back_grads(self, whole: Tensor) -> None:
        kept = self._grad_slots.get(whole.numel())
        if kept is not None and len(kept) < self._most_grad_slots:
            kept.append(whole)

    def shard_of(self, bucket: BucketPlan) -> Tensor:
        """Returns `[elements / num_shards]`, this rank's shard of a bucket's parameters."""
        start, end = bucket.layout.start, bucket.layout.end
        return self.shards[start // self._num_param_shards : end // self._num_param_shards]
