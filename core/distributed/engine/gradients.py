"""The gradient of a parameter that an optimizer reads, and how flat gradients are reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...base.parameters import local_part
from ...comm import collectives
from ...comm.gloo import Sum
from ...comm.lane import CommLane
from ...comm.message_formats import format_of_all
from ..plan import Plan
from ..step_marks import mark_of
from .gradient_tree import GradientTree


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `read_gradient`."""
    gradient = read_gradient(parameter)
    return None if gradient is None else local_part(gradient)


def read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient that the optimizer reads: ``main_grad`` where present, else ``grad``. None leaves it out.

    Under a wrapper ``grad`` counts: after `finish_grad_sync` it is the memory of ``main_grad``, or what the user has
    set it to since, also None. Where dtypes differ it is a tensor that cannot be read, in the place of ``main_grad``.
    """
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    shown = parameter.grad
    if gradient is None or gradient is shown:
        return shown
    counts = getattr(mark_of(parameter), "shows_gradients", False) and not is_unreadable(shown)
    return shown if counts else gradient


# ---- ``param.grad`` of gradients that are sharded, or in another dtype: a tensor that raises when it is read. With
# None, `torch.nn.utils.clip_grad_norm_` and loops over gradients would silently skip the parameter.

UNREADABLE = (
    "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank, or keeps it in "
    "another dtype; clip by shard_optimizer(..., clip_grad=...) or OptimizerConfig(clip_grad=...), read this rank's "
    "part with wrapper.local_gradient(param), or use the sharding strategy 'no_shard', and no setting that keeps "
    "gradients in fp32"
)


def is_unreadable(gradient: Any) -> bool:
    """Returns whether a gradient is an `UnreadableGradient`."""
    return type(gradient) is UnreadableGradient


class UnreadableGradient(Tensor):
    """A tensor without memory, to be ``param.grad`` of `param`, that raises whenever it is used."""

    added: Tensor
    """The gradient of a backward. Autograd's accumulation sets it, on its thread. The wrapper's hook, which autograd
    calls next, takes it away. It exists only between the two."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> UnreadableGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardstackError(UNREADABLE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Autograd adds a new gradient to `param.grad` in C++. Keep it for the wrapper's hook, which comes next.
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and is_unreadable(args[0]):
            vars(args[0])["added"] = args[1]
            return args[0]
        raise ShardstackError(UNREADABLE)


# ---- reductions over ranks

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
        # `reduce` runs in the lane, on its thread or stream.
        self.plan, self.lane, self.inspect, self.tree = plan, lane, inspect, tree
        self.group, self.order = plan.groups.whole, plan.sum_order
        self.shard_group = None if plan.is_replicated else plan.groups.shard
        self.replica_group = None if plan.is_replicated else plan.groups.replicate

    def reduce(
        self, whole: Tensor, shard: Tensor, accumulate: bool, what: str = "gradients", sent_as: str | None = None
    ) -> None:
        """Reduces `whole` `[n]` into `shard`, this rank's shard. Without shards both are the same tensor.

        The collective runs in the dtype of `whole`. `shard` may have a wider dtype, so that additions to it are not
        rounded, and may be in host memory, into which the copy then runs in the lane.

        Args:
            accumulate: add to the values of `shard`, which must then not be a part of `whole`.
            what: name of the gradients, for messages.
            sent_as: format in which ranks send them to be added; sums over `replica_group` travel as they are.
        """
        averages = not self.plan.sums_gradients and self.order is None
        scale, divisor = 1.0, self.plan.groups.divisor
        if averages and whole.dtype == torch.float16:
            whole.mul_(1.0 / divisor)
        elif averages:
            scale = 1.0 / divisor
        num_parts = (self.shard_group or self.group).size()
        sent_as_ = format_of_all(sent_as, len(whole) // num_parts, whole.dtype)
        how = Sum(scale=scale, order=self.order, sent_as=sent_as_)
        scatter, reduce = partial(collectives.reduce_scatter, what=what), partial(collectives.all_reduce, what=what)
        is_alike = (shard.dtype, shard.device) == (whole.dtype, whole.device)
        if self.shard_group is None:
            reduce(whole, self.group, how)
        elif self.replica_group is None and is_alike:
            scatter(shard, whole, self.shard_group, replace(how, accumulate=accumulate))
        else:
            part = shard if is_alike and not accumulate else whole.new_empty(len(shard))
            scatter(part, whole, self.shard_group, how if self.replica_group is None else replace(how, scale=1.0))
            if self.replica_group is not None:
                order = None if self.order is None else (range(self.replica_group.size()),)
                how = replace(how, order=order, sent_as=None)
                reduce(part, self.replica_group, how)
            if accumulate:  # on the device, where the lane does not wait for a copy
                part = shard.to(part.device, non_blocking=True).add_(part)
            if part is not shard:
                shard.copy_(part, non_blocking=True)
