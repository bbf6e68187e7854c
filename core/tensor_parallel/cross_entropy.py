"""Cross entropy over a vocabulary whose logits are split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..base.errors import ConfigError
from .groups import Group, check_ids, gather_first_dim, group_rank, group_size, resolve_group

IGNORE_INDEX = -100
"""A target that is no token: its loss and its gradient are zero. The value is torch's."""

# Elements of fp32 scratch at a time: on a CPU few enough for its cache, on a GPU enough to keep launches few.
_CHUNK_ELEMENTS = 2**20
_GPU_CHUNK_ELEMENTS = 2**25


def gather_sums_over_vocabulary(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """Gathers `[1, k, n]`, k sums over this rank's part of the vocabulary for n tokens, to `[tp, k, n]`."""
    if group is None or group_size(group) == 1:
        return mine
    return gather_first_dim(mine, group, what="the sums over the vocabulary")[0]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group: Group = None
) -> torch.Tensor:
    """Returns the loss of each token, in fp32, from logits `[..., v / tp]` and targets `[...]` that all ranks share.

    With `label_smoothing` e the target is 1 - e of its token and e / (v - 1) of every other (Szegedy et al., 2016),
    over the whole vocabulary of v. (Megatron-LM's formula at one rank; with several, it smooths over each rank's part
    by itself, so that their losses differ.)

    Communicates in one all-gather of two numbers per token, with smoothing three: the log-sum-exp of this rank's
    logits, the logit of the target, and the logits' sum. Saves only the given logits for backward; the softmax, of
    which torch's loss saves an fp32 copy, is computed again in fp32, a chunk of tokens at a time.

    Raises:
        DataError: a target is neither a token nor -100, which torch ignores too. Not checked on a GPU, where the check
            would synchronize: the loss of such a target is the log-sum-exp there.
        ConfigError: `label_smoothing` is outside 0 to below 1, or a process group is given in its place.
    """
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(
            f"label_smoothing is {label_smoothing!r}; it takes a number from 0 to below 1, and groups go to tp_group"
        )
    group = resolve_group(tp_group)
    size, vocab = group_size(group), vocab_parallel_logits.shape[-1]
    check_ids(target, vocab * size, "target", allowed=IGNORE_INDEX)
    logits = vocab_parallel_logits.reshape(-1, vocab)
    flat = target.reshape(-1)
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, flat, float(label_smoothing), group)
    return loss.view_as(target)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, group: Group
    ) -> torch.Tensor:
        tokens, vocab = logits.shape
        local = target - group_rank(group) * vocab  # [n], this rank's column where it has one
        here = (local >= 0) & (local < vocab) & (target != IGNORE_INDEX)
        column = local.masked_fill(~here, 0).unsqueeze(1)  # [n, 1]
        # The probability taken from the target, divided over the other tokens of the vocabulary.
        whole = vocab * group_size(group)
        smoothing = label_smoothing * whole / (whole - 1) if label_smoothing else 0.0
        mine = torch.empty(1, 3 if smoothing else 2, tokens, dtype=torch.float32, device=logits.device)
        for rows in _row_chunks(logits):
            mine[0, 0, rows] = torch.logsumexp(logits[rows].float(), dim=1)
            if smoothing:
                mine[0, 2, rows] = logits[rows].float().sum(dim=1)
        mine[0, 1] = logits.gather(1, column).squeeze(1).float().masked_fill_(~here, 0.0)
        everyone = gather_sums_over_vocabulary(mine, group)  # [tp, 2, n]
        log_sum_exp = torch.logsumexp(everyone[:, 0], dim=0)  # [n]
        ignored = target == IGNORE_INDEX
        ctx.save_for_backward(logits, log_sum_exp, column, here, ignored)
        ctx.smoothing, ctx.vocab_size = smoothing, whole
        if not smoothing:
            return (log_sum_exp - everyone[:, 1].sum(0)).masked_fill_(ignored, 0.0)
        expected = (1.0 - smoothing) * everyone[:, 1].sum(0) + (smoothing / whole) * everyone[:, 2].sum(0)
        return (log_sum_exp - expected).masked_fill_(ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum_exp, column, here, ignored = ctx.saved_tensors
        scale = grad.masked_fill(ignored, 0.0).unsqueeze(1)  # [n, 1]
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            # (softmax - target) * grad, in one buffer; the subtraction promotes to fp32 without a copy of the logits
            part = (logits[rows] - log_sum_exp[rows].unsqueeze(1)).exp_()
            of_target = -here[rows].to(part.dtype).unsqueeze(1)
            if ctx.smoothing:
                part.sub_(ctx.smoothing / ctx.vocab_size)
                of_target.mul_(1.0 - ctx.smoothing)
            part.scatter_add_(1, column[rows], of_target)
            grad_logits[rows] = part.mul_(scale[rows])
        return grad_logits, None, None, None


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, (_GPU_CHUNK_ELEMENTS if logits.is_cuda else _CHUNK_ELEMENTS) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)
