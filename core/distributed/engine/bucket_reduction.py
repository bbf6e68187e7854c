"""Reduces flat gradients over ranks: which collectives, in which order of additions, and what divides the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...comm import collectives
from ...comm.gloo import Sum
from ...comm.lane import CommLane
from ..plan import GradientReduction, Plan
from .gradient_tree import GradientTree

Inspect = Callable[[Iterable[tuple[str, Tensor]]], None]


class BucketReduction:
    """Reduces gradients over ranks, with what all buckets of one kind of parameters share.

    Divides by the number of replicas of dense parameters once: after the collective, on the shard, which is smaller;
    in fp16 before it, because a sum could overflow. With an order of sums it does not divide: the wrapper's
    `finish_grad_sync` does.

    Args:
        plan: the model's plan, over the ranks of these buckets.
        lane: runs the collectives: a thread on CPU, a stream on CUDA.
        inspect: called with names and gradients of a bucket before it is sent, to raise on invalid ones.
        tree: the order of additions over micro-batches, where there is one.

    Attributes:
        plan, lane, inspect, tree: the arguments.
        group: all ranks that hold replicas.
        shard_group: the ranks of this optimizer instance, which shard gradients; None if each keeps whole ones.
        replica_group: the ranks with the same shard, one in each optimizer instance; None with a single instance.
        order: the order in which ranks of `shard_group`, or else of `group`, are added; None leaves it to the backend.
    """

    def __init__(self, plan: Plan, lane: CommLane, inspect: Inspect, tree: GradientTree | None) -> None:
        # All fixed. `reduce` runs in the lane, on its thread or stream.
        self.plan, self.lane, self.inspect, self.tree = plan, lane, inspect, tree
        self.group, self.order = plan.groups.whole, plan.sum_order
        self.shard_group = None if plan.is_replicated else plan.groups.shard
        self.replica_group = None if plan.is_replicated else plan.groups.replicate

    def reduce(self, whole: Tensor, shard: Tensor, accumulate: bool, what: str = "gradients") -> None:
        """Reduces `whole` `[n]` into `shard`, this rank's shard. Without shards both are the same tensor.

        The collective runs in the dtype of `whole`. `shard` may have a wider dtype, so that additions to it are not
        rounded, and may be in host memory, into which the copy then runs in the lane.

        Args:
            accumulate: add to the values of `shard`, which must then not be a part of `whole`.
            what: name of the gradients, for messages.
        """
        averages = self.plan.reduction is GradientReduction.MEAN and self.order is None
        scale, divisor = 1.0, self.plan.groups.divisor
        if averages and whole.dtype == torch.float16:
            whole.mul_(1.0 / divisor)
        elif averages:
            scale = 1.0 / divisor
        how = Sum(scale=scale, order=self.order)
        scatter, reduce = partial(collectives.reduce_scatter, what=what), partial(collectives.all_reduce, what=what)
        if self.shard_group is None:
            reduce(whole, self.group, how)
        elif self.replica_group is None and (shard.dtype, shard.device) == (whole.dtype, whole.device):
            scatter(shard, whole, self.shard_group, replace(how, accumulate=accumulate))
        else:
            is_alike = (shard.dtype, shard.device) == (whole.dtype, whole.device)
            part = shard if is_alike and not accumulate else whole.new_empty(len(shard))
            scatter(part, whole, self.shard_group, how if self.replica_group is None else replace(how, scale=1.0))
            if self.replica_group is not None:
                how = replace(how, order=None if self.order is None else (range(self.replica_group.size()),))
                reduce(part, self.replica_group, how)
            if accumulate:  # on the device, where the lane does not wait for a copy
                part = shard.to(part.device, non_blocking=True).add_(part)
            if part is not shard:
                shard.copy_(part, non_blocking=True)
