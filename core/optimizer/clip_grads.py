"""The norm of the whole model's gradient, every element counted once, and clipping by it.

Squares are summed in double, on each rank over its own shards, then over the ranks; the norm is rounded to fp32 once.
In double, the effect of the order of summation is far below fp32's resolution, so a replicated and a sharded run clip
by the same number. (torch's fp32 norm is off by more the larger a tensor is, by an amount that depends on the shard's
shape.) Where the same bits are promised on any number of ranks, that is not enough: the sum is then exact
(`exact_sums`, a plug-in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.device import current_device, is_on_gpu
from ..comm.collectives import all_reduce_by_backend
from ..comm.lane import known_on_host
from ..distributed.groups import is_expert_parameter
from ..process_groups_config import ProcessGroupCollection
from .main_params import MainParam

CHUNK_ELEMENTS = 1 << 16
"""Elements that are squared at a time on CPU: 512 KiB, which a core's cache holds."""


class GradientStatistics:
    """Computes the norm of the whole model's gradient and its number of zeros, equal on every rank.

    A parameter is summed over the ranks that share its update, so replicas count once, and then over the ranks that
    have other parts of the model: tensor x pipeline, and for experts theirs x expert-parallel ranks. A parameter that
    every tensor-parallel rank holds counts only on the first of them (for experts, the first of their own); a copy
    marked ``shared`` (tied weights of another pipeline stage) does not count. Starts one small all-reduce for each
    distinct set of groups; each carries the sums of all its parameters and their number of zeros.

    Args:
        params: the parameters that the optimizer updates.
        groups: those of the model, of which it reads the ranks of a whole model, `mp`, the tensor-parallel ones, `tp`,
            and where experts are cut over other ranks theirs, `tp_ep_pp` and `expt_tp`.
    """

    def __init__(self, params: Sequence[MainParam], groups: ProcessGroupCollection) -> None:
        model_group, tp_rank = groups.mp or groups.tp, 0 if groups.tp is None else groups.tp.rank()
        expert_group, expert_tp_rank = model_group, tp_rank
        if groups.experts_are_apart:
            expert_group, expert_tp_rank = groups.tp_ep_pp, 0 if groups.expt_tp is None else groups.expt_tp.rank()
        # The parts of the norm, by the names of their groups; the indices of parameters grow here, then all is fixed.
        parts: dict[tuple[str, ...], _Part] = {}
        for over in dict.fromkeys((model_group, expert_group)):  # joined by a rank without such parameters too
            parts[() if over is None else (over.group_name,)] = _Part((), over, counts=True, members=[])
        for index, p in enumerate(params):
            sharers, is_expert = p.shard_groups(), is_expert_parameter(p.param)
            over, rank = (expert_group, expert_tp_rank) if is_expert else (model_group, tp_rank)
            is_summed = _share_ranks(sharers, over)  # a DTensor of tensor parallelism too
            key = tuple(group.group_name for group in (*sharers, *(() if over is None else (over,))))
            # Every rank joins every reduction, counted here or not.
            part = parts.setdefault(key, _Part(sharers, over, counts=rank == 0 or not is_summed, members=[]))
            is_cut = getattr(p.param, "tensor_model_parallel", False) or is_summed
            if (is_cut or rank == 0) and not getattr(p.param, "shared", False):
                part.members.append(index)
        self._parts = list(parts.values())
        self._groups = groups

    def over(self, params: Sequence[MainParam]) -> GradientStatistics:
        """Returns the same statistics of other parameters."""
        return type(self)(params, self._groups)

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool = False) -> Tensor:
        """Returns the L2 norm of the gradient, and how many of its elements are zero if asked, else 0.

        Every rank has to call it. Waits for no device.

        Args:
            grads: this rank's gradients, in the order of the parameters; None for a parameter without one.

        Returns:
            `[2]` in double, on the device of this process.
        """
        device = current_device()

        def sums_of(part: _Part) -> Tensor:
            shards = part.own_grads(grads)
            gpus = {place for place, grad in {grad.device: grad for grad in shards}.items() if is_on_gpu(grad)}
            sums = _sum_on_device([grad for grad in shards if grad.device in gpus], count_zeros, device)
            if on_host := [grad for grad in shards if grad.device not in gpus]:
                sums += _sum_on_host(on_host, count_zeros).to(device)
            return sums

        total = self._add_up(sums_of, torch.zeros(2, dtype=torch.float64, device=device))
        return torch.stack([total[0].sqrt(), total[1]])

    def _add_up(self, sums_of: Callable[[_Part], Tensor], total: Tensor) -> Tensor:
        """Adds the sums of each part's gradients over ranks to `total`, in place. Returns `total`."""
        for over, parts in self._by_model_group():
            of_model = torch.zeros_like(total)
            for part in parts:
                sums = sums_of(part)
                for group in part.groups:
                    all_reduce_by_backend(sums, group, what="the gradient norm")
                if part.counts:
                    of_model += sums
            total += reduce_over_model(of_model, over, "the gradient norm over the model")
        return total

    def _by_model_group(self) -> list[tuple[dist.ProcessGroup | None, list[_Part]]]:
        groups = dict.fromkeys(part.over for part in self._parts)
        return [(over, [part for part in self._parts if part.over is over]) for over in groups]


@dataclass(frozen=True)
class _Part:
    """Parameters whose norm is summed over the same ranks."""

    groups: tuple[dist.ProcessGroup, ...]
    """The ranks that share their updates."""
    over: dist.ProcessGroup | None
    """The ranks with other parts of the model."""
    counts: bool
    """False where `groups` have some of the ranks of `over`, and the sum over those counts on another."""
    members: list[int]
    """Indices of the parameters that count on this rank."""

    def own_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Returns the gradients that count here."""
        return [grad for i in self.members if (grad := grads[i]) is not None and grad.numel()]


def reduce_over_model(
    total: Tensor, group: dist.ProcessGroup | None, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduces in place over the ranks with other parts of the model. Returns `total`."""
    if group is not None and dist.get_world_size(group) > 1:
        all_reduce_by_backend(total, group, what=what, op=op)
    return total


def _share_ranks(groups: Sequence[dist.ProcessGroup], model_group: dist.ProcessGroup | None) -> bool:
    """Returns whether summing over `groups` sums over several of the model-parallel ranks already."""
    if model_group is None:
        return False
    ranks = set(dist.get_process_group_ranks(model_group))
    return any(len(ranks.intersection(dist.get_process_group_ranks(group))) > 1 for group in groups)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that brings gradients of `norm` down to `max_norm`: at most 1, and 1 where `max_norm` is 0.

    The small constant is Megatron-LM's and torch's, so that clipped runs agree with theirs.

    Args:
        norm: 0-dim, in double; so is the result.
    """
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)


def gradient_factor(norm: Tensor, max_norm: float, scale: float) -> Tensor | None:
    """Returns the factor of gradients with a loss scale, clipped: 1 where the norm is not finite.

    Args:
        norm: 0-dim, in double, without the loss scale; so is the result.

    Returns:
        None if the host knows that it is one.
    """
    if max_norm <= 0.0 and scale == 1.0:
        return None
    factor = clip_coefficient(norm, max_norm) / torch.full_like(norm, scale)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    return None if known_on_host(factor) == 1.0 else factor


def multiply_gradients(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place by a 0-dim double."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), same in by_kind.items():  # one kernel of torch for each takes a factor of its own kind
        torch._foreach_mul_(same, factor.to(device, dtype))


def _sum_on_host(grads: list[Tensor], count_zeros: bool) -> Tensor:
    """Returns ``[sum of squares, number of zeros]`` in double, converting tensors in chunks."""
    squares: list[Tensor] = []
    others: list[Tensor] = []
    numel = 0
    buffer = torch.empty(CHUNK_ELEMENTS, dtype=torch.float64)
    views: dict[torch.Size, tuple[Tensor, Tensor]] = {}  # of the buffer, flat and in the shape of a chunk
    for grad in grads:
        for chunk in (grad,) if grad.numel() <= CHUNK_ELEMENTS else grad.reshape(-1).split(CHUNK_ELEMENTS):
            if chunk.shape not in views:
                views[chunk.shape] = (flat := buffer[: chunk.numel()]), flat.view(chunk.shape)
            double, shaped = views[chunk.shape]
            shaped.copy_(chunk)
            squares.append(torch.dot(double, double))
            if count_zeros:  # on CPU three times as fast as `count_nonzero`
                torch.ne(double, 0.0, out=double)
                others.append(torch.dot(double, double))
                numel += len(double)
    return torch.stack([_sum_in_order(squares), numel - _sum_in_order(others)])


def _sum_in_order(addends: list[Tensor]) -> Tensor:
    """Adds 0-dim doubles one after the other: how many there are does not change how the first are added."""
    return torch.stack(addends).cumsum(0)[-1] if addends else torch.zeros((), dtype=torch.float64)


def _sum_on_device(grads: list[Tensor], count_zeros: bool, device: torch.device) -> Tensor:
    """Returns ``[sum of squares, number of zeros]`` of an accelerator's gradients, without waiting for it."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if grads:  # the multi-tensor norm accumulates in the dtype of its result
        sums[0] = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square().sum()
    if grads and count_zeros:
        sums[1] = number_of_zeros(grads)
    return sums


def number_of_zeros(grads: Sequence[Tensor]) -> Tensor:
    """Returns how many elements are zero, 0-dim, without waiting for the device."""
    counts = [torch.count_nonzero(run) for run in merge_contiguous(grads)]
    return sum(grad.numel() for grad in grads) - torch.stack(counts).sum()


def merge_contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Joins tensors that follow each other in memory, so that one kernel reads them.

    A wrapper's gradients follow each other: a bucket's in its buffer, those of a unit in what its reduction wrote.

    Returns:
        views of the same elements, in the order of their memory. Joined tensors are `[n]`, others keep their shape.
    """
    runs: list[list[Tensor]] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        if runs and _follows(runs[-1][-1], tensor):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return [run[0] if len(run) == 1 else run[0].as_strided((sum(t.numel() for t in run),), (1,)) for run in runs]


def _follows(first: Tensor, second: Tensor) -> bool:
    return (
        first.dtype is second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
    )
