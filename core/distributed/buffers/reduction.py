"""Reduces the gradient of a bucket over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ...comm import collectives
from ...comm.sums import SumOrder
from ..plan import GradientReduction


@dataclass(frozen=True, kw_only=True)
class BucketReduction:
    """Reduces gradients over ranks, in the groups and by the rules that all buckets of a wrapper share.

    Averages are taken once: by the collective (``average_in_collective``), or by multiplying the sum that a rank
    keeps, which is less than what it sent; in fp16, where a sum could overflow, by multiplying before.
    """

    group: ProcessGroup
    """All ranks that hold replicas."""

    shard_group: ProcessGroup | None = None
    """The ranks of this optimizer instance, among which gradients are cut; None leaves every rank the whole."""

    replica_group: ProcessGroup | None = None
    """The ranks that keep the same shard in each optimizer instance, where there is more than one."""

    scatters_over_replicas: bool = False
    """Each of these keeps a part of the shard, instead of all of it."""

    becomes: GradientReduction = GradientReduction.MEAN
    average_in_collective: bool = False
    fp32_accumulation: bool = False
    """Gradients travel in their own precision and are added in fp32."""

    order: SumOrder | None = None
    """How the ranks of `shard_group`, else of `group`, are added. Given, sums stay sums: `BucketSums` divides them.
    None: as the backend adds them."""

    def reduce(self, whole: Tensor, kept: Tensor, accumulate: bool, what: str = "gradients") -> None:
        """Reduces `whole` `[n]` into `kept`, this rank's part of it; without shards both are the same tensor.

        It is reduced in the dtype of `whole`; `kept` may be wider, so that what is added to it is not rounded, and in
        the host's memory, which it has reached on return.

        Args:
            accumulate: add to what `kept` holds; then it is no part of `whole`.
            what: its name for messages.
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
            if accumulate:
                kept.add_(part.to(kept.device))
            elif part is not kept:
                kept.copy_(part)
