"""Cross entropy over a vocabulary of which each tensor-parallel rank holds the logits of a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .mappings import Group, gather_first_dim, group_rank, group_size, resolve_group
from .vocab import check_ids

IGNORE_INDEX = -100
"""A target that is no token: its loss and its gradient are zero. The value is torch's."""

# Elements of fp32 scratch at a time: what a CPU's cache holds over all passes, and what keeps a GPU's launches few.
_CHUNK_ELEMENTS = 2**20
_GPU_CHUNK_ELEMENTS = 2**25


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """The loss of each token, in fp32, from logits `[..., v / tp]` and targets `[...]` that all ranks share.

    Across ranks goes one all-gather of two numbers a token: the log-sum-exp of this rank's logits and the logit of
    the target. Kept for the backward are the logits as they came, no softmax and no copy in fp32, which torch's own
    loss would keep; it is computed again there, in fp32, a chunk of tokens at a time.

    Raises:
        DataError: a target is neither a token nor -100, which torch ignores too. On a GPU looking would stall it:
            there the loss of such a target is the log-sum-exp alone.
    """
    group = resolve_group(group)
    size, vocab = group_size(group), vocab_parallel_logits.shape[-1]
    check_ids(target, vocab * size, "target", allowed=IGNORE_INDEX)
    logits = vocab_parallel_logits.reshape(-1, vocab)
    flat = target.reshape(-1)
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, flat, group)
    return loss.view_as(target)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Group) -> torch.Tensor:
        tokens, vocab = logits.shape
        local = target - group_rank(group) * vocab  # [n], this rank's column where it has one
        here = (local >= 0) & (local < vocab) & (target != IGNORE_INDEX)
        column = local.masked_fill(~here, 0).unsqueeze(1)  # [n, 1]
        mine = torch.empty(1, 2, tokens, dtype=torch.float32, device=logits.device)
        for rows in _row_chunks(logits):
            mine[0, 0, rows] = torch.logsumexp(logits[rows].float(), dim=1)
        mine[0, 1] = logits.gather(1, column).squeeze(1).float().masked_fill_(~here, 0.0)
        everyone = mine if group is None or group_size(group) == 1 else gather_first_dim(mine, group)[0]  # [tp, 2, n]
        log_sum_exp = torch.logsumexp(everyone[:, 0], dim=0)  # [n]
        ignored = target == IGNORE_INDEX
        ctx.save_for_backward(logits, log_sum_exp, column, here, ignored)
        return (log_sum_exp - everyone[:, 1].sum(0)).masked_fill_(ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, log_sum_exp, column, here, ignored = ctx.saved_tensors
        scale = grad.masked_fill(ignored, 0.0).unsqueeze(1)  # [n, 1]
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            # (softmax - one_hot) * grad, in one buffer; the subtraction promotes to fp32 without a copy of the logits
            part = (logits[rows] - log_sum_exp[rows].unsqueeze(1)).exp_()
            part.scatter_add_(1, column[rows], -here[rows].to(part.dtype).unsqueeze(1))
            grad_logits[rows] = part.mul_(scale[rows])
        return grad_logits, None, None


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, (_GPU_CHUNK_ELEMENTS if logits.is_cuda else _CHUNK_ELEMENTS) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)
