"""From logits to the experts of each token: scores, groups, top-k, probabilities. Functions without state."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..moe_config import MoEConfig

_SMALLEST_SUM = 1e-20


def choose_experts(
    logits: torch.Tensor, config: MoEConfig, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts of each token.

    Args:
        logits: `[tokens, experts]`.
        expert_bias: `[experts]`, added to the scores for the choice alone.

    Returns:
        The probability of each chosen expert `[tokens, k]`, in the logits' dtype, and its index `[tokens, k]`.
    """
    topk = config.moe_router_topk
    if config.moe_router_score_function == "softmax":
        ranked = _widened(logits)
        if config.moe_router_pre_softmax:
            ranked = ranked.softmax(-1)
        experts = _best(ranked, config)
        probs = ranked.gather(1, experts)
        if not config.moe_router_pre_softmax:
            probs = probs.softmax(-1)
    else:
        scores = _scores(logits, config.moe_router_score_function)
        experts = _best(scores if expert_bias is None else scores + expert_bias, config)
        probs = scores.gather(1, experts)
        if topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + _SMALLEST_SUM)
    if config.moe_router_topk_scaling_factor is not None:
        probs = probs * config.moe_router_topk_scaling_factor
    return probs.to(logits.dtype), experts


def shares_of_experts(logits: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Returns the scores of all experts, which add up to one for each token, `[tokens, experts]`: what balancing
    losses read."""
    scores = _scores(logits, config.moe_router_score_function)
    if config.moe_router_score_function == "softmax":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)


def count_tokens(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Counts tokens for each expert: `[..., k]` indices to `[..., experts]`, in int64."""
    counts = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(-1, experts, torch.ones_like(experts))


def _scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    wide = _widened(logits)
    if function == "softmax":
        return wide.softmax(-1)
    return wide.sigmoid() if function == "sigmoid" else F.softplus(wide).sqrt()


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def _best(ranked: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Returns the indices of the best experts, of the best groups if there are any (DeepSeek-AI, 2024).

    The score of a group is the sum of as many of its best experts as a token takes from each group.
    """
    topk, num_groups, chosen = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    if num_groups is not None and chosen is not None:
        grouped = ranked.unflatten(-1, (num_groups, -1))  # [tokens, groups, experts of a group]
        score = grouped.topk(topk // chosen, dim=-1).values.sum(-1)
        closed = torch.ones_like(score, dtype=torch.bool).scatter_(-1, score.topk(chosen, dim=-1).indices, False)
        ranked = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return ranked.topk(topk, dim=-1).indices
