"""Sorts tokens by expert and back, by gathers alone in both directions: their results do not depend on an order of
additions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..moe_config import MoEConfig
from .routing import count_tokens


@dataclass(frozen=True)
class Permutation:
    """The rows of experts: one for each token and each of its k experts, those of one expert next to each other.

    Rows that no expert takes, because it is full, are at the end: the number of rows never depends on the routing.
    """

    order: torch.Tensor
    """Of each row, its place in `[tokens x k]`."""
    inverse: torch.Tensor
    """Of each place, its row."""
    ends: torch.Tensor
    """Of each expert, the end of its rows; int32."""
    row_experts: torch.Tensor
    """The expert of each row; of a dropped row, the one that is full."""
    topk: int
    has_dropped: bool
    """Whether there may be rows after the last end."""

    @property
    def dropped_rows(self) -> torch.Tensor:
        """True for rows that no expert takes, `[rows, 1]`."""
        rows = torch.arange(len(self.order), device=self.ends.device)
        dropped: torch.Tensor = (rows >= self.ends[-1]).unsqueeze(-1)
        return dropped

    def to_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies each token `[tokens, h]` to the rows of its experts, `[tokens x k, h]`."""
        rows: torch.Tensor = _Rows.apply(tokens, self.order, self.inverse, self.topk)
        return rows

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Brings rows `[tokens x k, h]` back to their tokens, `[tokens, k, h]`."""
        places: torch.Tensor = _Places.apply(rows, self.order, self.inverse)
        return places.view(-1, self.topk, rows.shape[-1])


@torch.no_grad()
def sort_by_expert(experts: torch.Tensor, probs: torch.Tensor, config: MoEConfig) -> Permutation:
    """Sorts tokens by expert, and drops those over its capacity.

    Args:
        experts, probs: of each token its experts and their probabilities, `[tokens, k]`.
    """
    num_experts, topk = config.num_moe_experts or 0, config.moe_router_topk
    flat = experts.flatten()
    counts = count_tokens(flat, num_experts)
    factor = config.moe_expert_capacity_factor
    if factor is not None and config.moe_token_drop_policy == "probs":
        order = probs.flatten().argsort(descending=True, stable=True)
        order = order[flat[order].argsort(stable=True)]
    else:
        order = flat.argsort(stable=True)
    row_experts = flat[order]
    if factor is not None:
        capacity = math.ceil(flat.numel() / num_experts * factor)
        rows = torch.arange(len(flat), device=flat.device)
        is_full = rows - (counts.cumsum(0) - counts)[row_experts] >= capacity
        last = is_full.to(torch.uint8).argsort(stable=True)
        order, row_experts, counts = order[last], row_experts[last], counts.clamp(max=capacity)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Permutation(order, inverse, counts.cumsum(0).to(torch.int32), row_experts, topk, factor is not None)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, topk: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return tokens.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.topk)).sum(1), None, None, None


class _Places(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None
