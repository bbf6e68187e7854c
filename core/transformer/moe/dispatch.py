"""Brings tokens to the ranks that have their experts, and the outputs back, by Megatron-LM's names of the two ways.

allgather   every rank gets all tokens of its expert-parallel group, and computes those that its experts take; the
            weighted sums of all ranks are reduced
alltoall    a token goes to the ranks of its experts alone, and its outputs return to be summed where it came from
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ... import parallel_state
from ...base.errors import DataError
from ...comm.collectives import all_reduce_by_backend, all_to_all_by_backend
from ...tensor_parallel.groups import group_size
from ...tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from ...tensor_parallel.partition import gather_first_dim
from ..moe_config import MoEConfig
from .permutation import Permutation, sort_by_expert

Compute = Callable[[torch.Tensor, Permutation], torch.Tensor]
"""Maps rows `[rows, h]`, sorted by expert, to the outputs of their experts, `[rows, h]`."""


def dispatch(
    tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, compute: Compute, config: MoEConfig
) -> torch.Tensor:
    """Returns for each token the sum of its experts' outputs times their probabilities, `[tokens, h]`.

    Every expert-parallel rank calls it, with tokens of its own.

    Args:
        tokens: `[tokens, h]`.
        probs, experts: of each token its experts and their probabilities, `[tokens, k]`; the expert is
            `num_moe_experts` where it has dropped the token.
        compute: the experts of this rank.
    """
    num_experts, has_dropped = config.num_moe_experts or 0, config.moe_expert_capacity_factor is not None
    group = parallel_state.get_expert_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return _combine(tokens, probs, sort_by_expert(experts, num_experts, has_dropped), compute)
    if config.moe_token_dispatcher_type == "alltoall":
        permutation = sort_by_expert(experts, num_experts, has_dropped).without_dropped()
        return _combine(tokens, probs, permutation, partial(_compute_elsewhere, compute=compute, group=group))
    tokens, probs, experts = gather_tokens(tokens, probs, experts, group)
    num_own = num_experts // group.size()
    own = experts - group.rank() * num_own
    own = torch.where((own >= 0) & (own < num_own), own, num_own)
    combined = _combine(tokens, probs, sort_by_expert(own, num_own, True).without_dropped(), compute)
    return reduce_scatter_to_sequence_parallel_region(combined, group)


def gather_tokens(
    tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gathers tokens, and the choice of their experts, of all ranks. Gradients are partial sums, which are added over
    ranks.

    Raises:
        DataError: ranks have other numbers of tokens. On a GPU, whose host does not wait for it, the device stops.
    """
    if group_size(group) == 1:
        return tokens, probs, experts
    extremes = torch.stack([experts.new_full((), n) for n in (len(tokens), -len(tokens))])
    all_reduce_by_backend(extremes, group, what="the number of tokens", op=dist.ReduceOp.MAX)
    message = (
        f"expert-parallel ranks have micro-batches of different sizes, and this one of {len(tokens)} tokens; take "
        "moe_token_dispatcher_type 'alltoall', or micro-batches of one shape"
    )
    if extremes.is_cuda:
        torch._assert_async(extremes.sum() == 0, message)
    elif extremes.sum():
        raise DataError(message)
    gathered, _ = gather_first_dim(experts, group, what="the experts of tokens")
    return (
        gather_from_sequence_parallel_region(tokens, group=group),
        gather_from_sequence_parallel_region(probs, group=group),
        gathered,
    )


def _combine(tokens: torch.Tensor, probs: torch.Tensor, permutation: Permutation, compute: Compute) -> torch.Tensor:
    rows = compute(permutation.to_rows(tokens), permutation)
    if permutation.has_dropped:
        rows = rows.masked_fill(permutation.dropped_rows, 0.0)
    places = permutation.from_rows(rows)  # [tokens, k, h]
    combined: torch.Tensor = (places * probs.unsqueeze(-1)).sum(1).to(tokens.dtype)
    return combined


def _compute_elsewhere(
    rows: torch.Tensor, permutation: Permutation, *, compute: Compute, group: dist.ProcessGroup
) -> torch.Tensor:
    """Computes rows, sorted by the experts of all ranks, on the ranks that have these. The host waits for the
    device."""
    counts = permutation.ends.diff(prepend=permutation.ends.new_zeros(1)).long()
    arriving = torch.empty_like(counts)
    all_to_all_by_backend(arriving, counts, group, what="the number of tokens of each expert")
    by_rank = arriving.view(group.size(), -1)  # [ranks, experts of this rank]
    sent, received = counts.view_as(by_rank).sum(1).tolist(), by_rank.sum(1).tolist()
    own = torch.arange(by_rank.shape[1], device=rows.device).repeat(group.size()).repeat_interleave(arriving)
    by_expert = sort_by_expert(own.unsqueeze(1), by_rank.shape[1])
    arrived = by_expert.to_rows(_Exchange.apply(rows, sent, received, group))
    outputs = by_expert.from_rows(compute(arrived, by_expert)).squeeze(1)
    returned: torch.Tensor = _Exchange.apply(outputs, received, sent, group)
    return returned


class _Exchange(torch.autograd.Function):
    """Sends rows to ranks. Backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        what = "tokens on the way to experts and back"
        all_to_all_by_backend(arrived, rows.contiguous(), group, what=what, sizes=(received, sent))
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.sizes), None, None, None
