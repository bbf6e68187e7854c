"""Sorts tokens by expert, brings them to the ranks that have their experts, and the outputs back.

Megatron-LM's names of the two ways:

allgather   every rank gets all tokens of its expert-parallel group, and computes those that its experts take; the
            weighted sums of all ranks are reduced
alltoall    a token goes to the ranks of its experts alone, and its outputs return to be summed where it came from

Tokens are sorted by gathers alone in both directions: results do not depend on an order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ... import parallel_state
from ...base.errors import DataError
from ...comm.collectives import all_reduce_by_backend, all_to_all_by_backend
from ...comm.lane import read_now
from ...tensor_parallel import mappings
from ...tensor_parallel.groups import gather_first_dim, group_size
from ..moe_config import MoEConfig
from .router import count_tokens


@dataclass(frozen=True)
class Permutation:
    """The rows of experts: one for each token and each of its k experts, sorted by expert.

    Rows that no expert here takes are at the end, so that the number of rows does not depend on the routing;
    `without_dropped` leaves them out.
    """

    order: Tensor
    """Place of each row in `[tokens x k]`."""
    inverse: Tensor
    """Row of each place. At or past the end of `order` if the place has none."""
    ends: Tensor
    """End of each expert's rows, in int32."""
    row_experts: Tensor
    """The expert of each row. The last expert for a dropped row."""
    topk: int
    has_dropped: bool
    """Whether there may be rows after the last end."""
    known_ends: list[int] | None = None
    """`ends` where the host has them already."""

    @cached_property
    def host_ends(self) -> list[int]:
        """`ends` on the host, which waits for the device where they are not known, once."""
        return read_now(self.ends) if self.known_ends is None else self.known_ends

    @property
    def dropped_rows(self) -> Tensor:
        """True for rows that no expert takes, `[rows, 1]`."""
        rows = torch.arange(len(self.order), device=self.ends.device)
        return (rows >= self.ends[-1]).unsqueeze(-1)

    def without_dropped(self) -> Permutation:
        """Returns the permutation without rows that no expert takes, with its ends on the host."""
        if not self.has_dropped:
            return self
        end, rows = self.host_ends[-1], self.row_experts
        return replace(
            self, order=self.order[:end], row_experts=rows[:end], has_dropped=False, known_ends=self.host_ends
        )

    def to_rows(self, tokens: Tensor) -> Tensor:
        """Copies each token `[tokens, h]` to the rows of its experts, `[rows, h]`."""
        output: Tensor = _Rows.apply(tokens, self.order, self.inverse, self.topk)
        return output

    def from_rows(self, rows: Tensor) -> Tensor:
        """Brings rows `[rows, h]` back to their tokens, `[tokens, k, h]`, with zeros for places without a row."""
        places: Tensor = _Places.apply(rows, self.order, self.inverse)
        return places.view(-1, self.topk, rows.shape[-1])


@torch.no_grad()
def drop_over_capacity(experts: Tensor, probs: Tensor, config: MoEConfig) -> Tensor:
    """Returns each token's experts, with `num_moe_experts` for those that are full.

    Args:
        experts, probs: of each token its experts and their probabilities, `[tokens, k]`.
    """
    factor, num_experts = config.moe_expert_capacity_factor, config.num_moe_experts or 0
    if factor is None:
        return experts
    flat = experts.flatten()
    if config.moe_token_drop_policy == "probs":
        order = probs.flatten().argsort(descending=True, stable=True)
        order = order[flat[order].argsort(stable=True)]
    else:
        order = flat.argsort(stable=True)
    row_experts, counts = flat[order], count_tokens(flat, num_experts)
    rows = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[row_experts]
    is_full = rows >= math.ceil(flat.numel() / num_experts * factor)
    return torch.empty_like(flat).scatter_(0, order, row_experts.masked_fill(is_full, num_experts)).view_as(experts)


@torch.no_grad()
def sort_by_expert(experts: Tensor, num_experts: int, has_dropped: bool = False) -> Permutation:
    """Sorts tokens by expert.

    Args:
        experts: of each token its experts, `[tokens, k]`.
        has_dropped: `experts` may be `num_experts`, where no expert here takes the token.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = count_tokens(flat, num_experts + 1)[:-1].cumsum(0).to(torch.int32)
    row_experts = flat[order].clamp(max=num_experts - 1)
    return Permutation(order, inverse, ends, row_experts, experts.shape[-1], has_dropped)


Compute = Callable[[Tensor, Permutation], Tensor]
"""Maps rows `[rows, h]`, sorted by expert, to the outputs of their experts, `[rows, h]`."""


def dispatch(tokens: Tensor, probs: Tensor, experts: Tensor, compute: Compute, config: MoEConfig) -> Tensor:
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
        permutation = sort_by_expert(experts, num_experts, has_dropped)
        routes = _exchange_counts(permutation, group)
        permutation = replace(permutation, known_ends=routes.ends).without_dropped()
        return _combine(tokens, probs, permutation, partial(_compute_elsewhere, compute=compute, routes=routes))
    tokens, probs, experts = gather_tokens(tokens, probs, experts, group)
    num_own = num_experts // group.size()
    own = experts - group.rank() * num_own
    own = torch.where((own >= 0) & (own < num_own), own, num_own)
    output = _combine(tokens, probs, sort_by_expert(own, num_own, True).without_dropped(), compute)
    return mappings.reduce_scatter_to_sequence_parallel_region(output, group)


def gather_tokens(
    tokens: Tensor, probs: Tensor, experts: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
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
    all_experts, _ = gather_first_dim(experts, group, what="the experts of tokens")
    return (
        mappings.gather_from_sequence_parallel_region(tokens, group=group),
        mappings.gather_from_sequence_parallel_region(probs, group=group),
        all_experts,
    )


def _combine(tokens: Tensor, probs: Tensor, permutation: Permutation, compute: Compute) -> Tensor:
    rows = compute(permutation.to_rows(tokens), permutation)
    if permutation.has_dropped:
        rows = rows.masked_fill(permutation.dropped_rows, 0.0)
    places = permutation.from_rows(rows)  # [tokens, k, h]
    return (places * probs.unsqueeze(-1)).sum(1).to(tokens.dtype)


@dataclass(frozen=True)
class _Routes:
    """How many rows go from which rank to which."""

    group: dist.ProcessGroup
    ends: list[int]
    """End of the rows of each expert of all ranks, among those sorted here."""
    arriving: Tensor
    """Rows from each rank to each expert of this one, `[ranks x experts]`."""
    from_ranks: list[list[int]]
    """The same on the host."""

    @property
    def ins(self) -> list[int]:
        """Rows from here to each rank."""
        ends = self.ends[len(self.from_ranks[0]) - 1 :: len(self.from_ranks[0])]
        return [end - begin for begin, end in pairwise([0, *ends])]

    @property
    def outs(self) -> list[int]:
        """Rows from each rank to here."""
        return [sum(of_rank) for of_rank in self.from_ranks]


def _exchange_counts(permutation: Permutation, group: dist.ProcessGroup) -> _Routes:
    """Learns from the other ranks what arrives. Here alone a layer's host waits for the device."""
    counts = permutation.ends.diff(prepend=permutation.ends.new_zeros(1)).long()
    arriving = torch.empty_like(counts)
    all_to_all_by_backend(arriving, counts, group, what="the number of tokens of each expert")
    ends, from_ranks = read_now(torch.stack([permutation.ends, arriving]))
    own = len(ends) // group.size()
    return _Routes(group, ends, arriving, [from_ranks[at : at + own] for at in range(0, len(ends), own)])


def _compute_elsewhere(rows: Tensor, permutation: Permutation, *, compute: Compute, routes: _Routes) -> Tensor:
    """Computes rows, sorted by the experts of all ranks, on the ranks that have these."""
    ins, outs, num_own = routes.ins, routes.outs, len(routes.from_ranks[0])
    own = torch.arange(num_own, device=rows.device).repeat(len(outs))
    by_expert = sort_by_expert(own.repeat_interleave(routes.arriving, output_size=sum(outs)).unsqueeze(1), num_own)
    ends = list(accumulate(map(sum, zip(*routes.from_ranks, strict=True))))
    by_expert = replace(by_expert, known_ends=ends)
    own_rows = by_expert.to_rows(_Exchange.apply(rows, ins, outs, routes.group))
    outputs = by_expert.from_rows(compute(own_rows, by_expert)).squeeze(1)
    output: Tensor = _Exchange.apply(outputs, outs, ins, routes.group)
    return output


class _Exchange(torch.autograd.Function):
    """Sends rows to ranks. Backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ins: list[int], outs: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = outs, ins, group
        output = rows.new_empty(sum(outs), rows.shape[1])
        what = "tokens on the way to experts and back"
        all_to_all_by_backend(output, rows.contiguous(), group, what=what, sizes=(outs, ins))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.sizes), None, None, None


def _by_place(rows: Tensor, inverse: Tensor) -> Tensor:
    """Returns the row of each place, zeros for a place without one."""
    if len(rows) < len(inverse):
        rows, inverse = F.pad(rows, (0, 0, 0, 1)), inverse.clamp(max=len(rows))
    return rows.index_select(0, inverse)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return tokens.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _by_place(grad, inverse).unflatten(0, (-1, ctx.topk)).sum(1), None, None, None


class _Places(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _by_place(rows, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None
