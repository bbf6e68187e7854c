"""Sorts tokens by expert and back, by gathers alone in both directions: their results do not depend on an order of
additions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..moe_config import MoEConfig
from .routing import count_tokens


@dataclass(frozen=True)
class Permutation:
    """The rows of experts: one for each token and each of its k experts, those of one expert next to each other.

    Rows that no expert here takes are at the end, so that the number of rows does not depend on the routing;
    `without_dropped` leaves them out.
    """

    order: torch.Tensor
    """Of each row, its place in `[tokens x k]`."""
    inverse: torch.Tensor
    """Of each place, its row. At or past the end of `order` if it has none."""
    ends: torch.Tensor
    """Of each expert, the end of its rows, in int32."""
    row_experts: torch.Tensor
    """The expert of each row. Of a dropped row, the last one."""
    topk: int
    has_dropped: bool
    """Whether there may be rows after the last end."""

    @property
    def dropped_rows(self) -> torch.Tensor:
        """True for rows that no expert takes, `[rows, 1]`."""
        rows = torch.arange(len(self.order), device=self.ends.device)
        dropped: torch.Tensor = (rows >= self.ends[-1]).unsqueeze(-1)
        return dropped

    def without_dropped(self) -> Permutation:
        """Returns the permutation without rows that no expert takes. The host waits for the device."""
        if not self.has_dropped:
            return self
        end = int(self.ends[-1])
        return replace(self, order=self.order[:end], row_experts=self.row_experts[:end], has_dropped=False)

    def to_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies each token `[tokens, h]` to the rows of its experts, `[rows, h]`."""
        rows: torch.Tensor = _Rows.apply(tokens, self.order, self.inverse, self.topk)
        return rows

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Brings rows `[rows, h]` back to their tokens, `[tokens, k, h]`, with zeros for places without a row."""
        places: torch.Tensor = _Places.apply(rows, self.order, self.inverse)
        return places.view(-1, self.topk, rows.shape[-1])


@torch.no_grad()
def drop_over_capacity(experts: torch.Tensor, probs: torch.Tensor, config: MoEConfig) -> torch.Tensor:
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
def sort_by_expert(experts: torch.Tensor, num_experts: int, has_dropped: bool = False) -> Permutation:
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


def _by_place(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Returns the row of each place, zeros for a place without one."""
    if len(rows) < len(inverse):
        rows, inverse = F.pad(rows, (0, 0, 0, 1)), inverse.clamp(max=len(rows))
    return rows.index_select(0, inverse)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, topk: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return tokens.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _by_place(grad, inverse).unflatten(0, (-1, ctx.topk)).sum(1), None, None, None


class _Places(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return _by_place(rows, inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None
