"""Reduces the gradient of a bucket over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ...comm import collectives
from ...comm.gloo import SumOrder
from ..plan import GradientReduction


@dataclass(frozen=True, kw_only=True)
class BucketReduction:
    """Reduces gradients over ranks, with the groups and settings that all buckets of a wrapper share.

    Divides by the number of ranks once: in the collective (``average_in_collective``); else after it, on the shard,
    which is smaller; else, in fp16, before it, because a sum could overflow.
    """

    group: ProcessGroup
    """All ranks that hold replicas."""

    shard_group: ProcessGroup | None = None
    """The ranks of this optimizer instance, which shard gradients; None if every rank keeps whole gradients."""

    replica_group: ProcessGroup | None = None
    """The ranks with the same shard, one in each optimizer instance; None with a single instance."""

    scatters_over_replicas: bool = False
    """Each rank of `replica_group` keeps a part of the shard, instead of all of it."""

    becomes: GradientReduction = GradientReduction.MEAN
    average_in_collective: bool = False
    fp32_accumulation: bool = False
    """Gradients travel in their own precision and are added in fp32."""

    order: SumOrder | None = None
    """The order in which ranks of `shard_group`, or else of `group`, are added. With an order, the reduction does not
    divide: `BucketSums` does. None leaves the order to the backend."""

    def reduce(self, whole: Tensor, kept: Tensor, accumulate: bool, what: str = "gradients") -> None:
        """Reduces `whole` `[n]` into `kept`, this rank's shard; without shards both are the same tensor.

        The collective runs in the dtype of `whole`. `kept` may have a wider dtype, so that additions to it are not
        rounded, and may be in host memory, into which the copy then runs in the lane.

        Args:
            accumulate: add to the values of `kept`, which must then not be a part of `whole`.
            what: name of the gradients, for messages.
        """
        averages = self.becomes is GradientReduction.MEAN and self.order is None
        op, scale = ReduceOp.SUM, 1.0
        if averages and self.average_in_collective:
            op = ReduceOp.AVG
        elif averages and whole.dtype == torch.float16:
            whole.mul_(1.0 / self.group.size())
        elif averages:
            scale = 1.0 / self.group.size()
        scatter = partial(collectives.reduce_scatter, op=op, fp32_accumulation=self.fp32_accumulation)
        reduce = partial(collectives.all_reduce, op=op, scale=scale, fp32_accumulation=self.fp32_accumulation)
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
                if self.scatters_over_replicas:
                    own = part.chunk(self.replica_group.size())[self.replica_group.rank()]
                    scatter(own, part, self.replica_group, what=what, scale=scale, order=replicas)
                    part = own
                else:
                    reduce(part, self.replica_group, what=what, order=replicas)
            if accumulate:  # on the device, where the lane does not wait for a copy
                part = kept.to(part.device, non_blocking=True).add_(part)
            if part is not kept:
                kept.copy_(part, non_blocking=True)
