"""Reduces the gradient of a bucket over ranks, and sums it over micro-batches in the order of a tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ...comm import collectives
from ..gradient_tree import GradientTree, PartialSums
from ..plan import GradientReduction, Plan
from .buffer import Bucket


class BucketReduction:
    """Reduces gradients over ranks, with the groups and settings that all buckets of dense parameters share, or all of
    experts.

    Divides by the number of replicas of dense parameters once: in the collective (``average_in_collective``); else
    after it, on the shard, which is smaller; else, in fp16, before it, because a sum could overflow. With an order of
    sums it does not divide: the wrapper's `finish_grad_sync` does.

    Args:
        plan: of the model, over the ranks of these buckets.
        shard_group: the ranks of this optimizer instance, which shard gradients; ignored where nothing is sharded.

    Attributes:
        group: all ranks that hold replicas.
        shard_group: as given; None if every rank keeps whole gradients.
        replica_group: the ranks with the same shard, one in each optimizer instance; None with a single instance.
        order: the order in which ranks of `shard_group`, or else of `group`, are added; None leaves it to the backend.
    """

    def __init__(self, plan: Plan, shard_group: ProcessGroup) -> None:
        self._plan, self.group, self.order = plan, plan.groups.whole, plan.sum_order
        self.shard_group = None if plan.is_replicated else shard_group
        self.replica_group = None if plan.is_replicated else plan.groups.replicate

    def reduce(self, whole: Tensor, kept: Tensor, accumulate: bool, what: str = "gradients") -> None:
        """Reduces `whole` `[n]` into `kept`, this rank's shard; without shards both are the same tensor.

        The collective runs in the dtype of `whole`. `kept` may have a wider dtype, so that additions to it are not
        rounded, and may be in host memory, into which the copy then runs in the lane.

        Args:
            accumulate: add to the values of `kept`, which must then not be a part of `whole`.
            what: name of the gradients, for messages.
        """
        averages = self._plan.reduction is GradientReduction.MEAN and self.order is None
        op, scale, divisor = ReduceOp.SUM, 1.0, self._plan.groups.divisor
        if averages and self._plan.average_in_collective:
            op, scale = ReduceOp.AVG, self.group.size() / divisor
        elif averages and whole.dtype == torch.float16:
            whole.mul_(1.0 / divisor)
        elif averages:
            scale = 1.0 / divisor
        in_fp32 = self._plan.reduce_scatter_with_fp32_accumulation
        scatter = partial(collectives.reduce_scatter, op=op, fp32_accumulation=in_fp32)
        reduce = partial(collectives.all_reduce, op=op, scale=scale, fp32_accumulation=in_fp32)
        if self.shard_group is None:
            reduce(whole, self.group, what=what, order=self.order)
        elif self.replica_group is None and (kept.dtype, kept.device) == (whole.dtype, whole.device):
            scatter(kept, whole, self.shard_group, what=what, scale=scale, accumulate=accumulate, order=self.order)
        else:
            length = len(whole) // self.shard_group.size()
            is_final = (kept.dtype, kept.device, len(kept)) == (whole.dtype, whole.device, length) and not accumulate
            part = kept if is_final else whole.new_empty(length)
            if self.replica_group is None:
                scatter(part, whole, self.shard_group, what=what, scale=scale, order=self.order)
            else:
                scatter(part, whole, self.shard_group, what=what, order=self.order)
                replicas = None if self.order is None else (range(self.replica_group.size()),)
                if self._plan.num_updated_parts > self._plan.num_shards:
                    own = part.chunk(self.replica_group.size())[self.replica_group.rank()]
                    scatter(own, part, self.replica_group, what=what, scale=scale, order=replicas)
                    part = own
                else:
                    reduce(part, self.replica_group, what=what, order=replicas)
            if accumulate:  # on the device, where the lane does not wait for a copy
                part = kept.to(part.device, non_blocking=True).add_(part)
            if part is not kept:
                kept.copy_(part, non_blocking=True)


class BucketSums:
    """Keeps sums of a bucket's earlier micro-batches, until the tree adds them to later ones.

    Args:
        tree: the wrapper's tree; it decides when a sum is set aside.
        of_shards: each chunk is reduced on its own, so that sums are of this rank's shard; else of whole gradients.
        wait: returns when no reduction of the bucket is running.
    """

    def __init__(self, bucket: Bucket, tree: GradientTree, *, of_shards: bool, wait: Callable[[], None]) -> None:
        self._bucket, self._of_shards, self._wait = bucket, of_shards, wait
        # Owns the memory of the sums that are set aside: `_begin` adds them; `complete` takes whole gradients out,
        # `finish` takes shards out, `clear` drops all. On the thread that runs backward, or between backwards.
        self._sums = PartialSums()
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that are set aside."""
        return self._sums.tensors

    def _begin(self, additions: int | None, reduces: bool) -> None:
        if additions is None:
            return
        if self._of_shards:
            self._wait()
            self._sums.set_aside([self._bucket.local_grad_shard], additions)
            self._bucket.separate_shard = None
        else:
            self._set_whole_aside(additions)

    def _set_whole_aside(self, additions: int) -> None:
        bucket, memory = self._bucket, self._bucket.buffer.grad_memory
        whole = bucket.complete_grads()
        if bucket.releases_grads:
            bucket.release_grads()
            kept = None
        else:
            for slot in bucket.slots:
                slot.restart()
            kept = whole
            if not additions:
                whole = memory.take(bucket.numel).copy_(whole)
        for free in self._sums.set_aside([whole], additions):
            if free is not kept:
                memory.give_back(free)

    @torch.no_grad()
    def complete(self, whole: Tensor) -> None:
        """Adds the earlier sums to the last sum of a step, `whole` `[numel]`, before it is reduced."""
        if self._of_shards:
            return
        set_aside = self._sums.tensors
        self._sums.added_to([whole])
        for free in set_aside:
            self._bucket.buffer.grad_memory.give_back(free)

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the earlier sums of shards to the bucket's shard, once all reductions have finished."""
        if self._of_shards:
            self._sums.added_to([self._bucket.local_grad_shard])

    def clear(self) -> None:
        """Begins a step: drops the sums of the last one."""
        self._sums.clear()
