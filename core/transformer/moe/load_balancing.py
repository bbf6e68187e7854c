"""Auxiliary losses that balance experts, and how they join the loss of a model.

A loss of experts is added to the loss of every token of its micro-batch: whatever a training loop does with the losses
of tokens (means, sums, masks, loss scales, accumulation, means over ranks), it does with this one, so that a
coefficient means the same everywhere. Megatron-LM and Hugging Face set its scale next to that of the main loss; see
`docs/experts.md`.

Each context-parallel rank computes an addend, from the scores of its own tokens and the counts of all: the addends of
the ranks that share sequences add up to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import parallel_state
from ...base.errors import ParallelStateError
from ...comm.collectives import all_reduce_by_backend
from ...tensor_parallel.groups import Group, group_size


def switch_loss(shares: Tensor, counts: Tensor, num_tokens: int, topk: int) -> Tensor:
    """Returns experts x sum over experts of (mean share x fraction of choices): 1 if balanced (Fedus et al., 2021).

    Args:
        shares: `[..., tokens, experts]`, scores of this rank's tokens, which add up to one for each token.
        counts: `[..., experts]`, tokens of each expert on all ranks that share the sequences, or a mean of such.
        num_tokens: tokens on these ranks.

    Returns:
        This rank's addend, 0-dim: the mean over the leading dims.
    """
    experts = shares.shape[-1]
    per_batch = (shares.sum(-2) * counts).sum(-1) * (experts / (topk * num_tokens**2))
    return per_batch.mean()


def z_loss(logits: Tensor, num_tokens: int) -> Tensor:
    """Returns the mean square of the logits' logsumexp over `num_tokens`, as this rank's addend, 0-dim."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.logsumexp(-1).square().sum() / num_tokens


def sum_counts(counts: Tensor, group: Group) -> Tensor:
    """Adds up the counts of a group's ranks, in place."""
    if group_size(group) > 1:
        all_reduce_by_backend(counts, group, what="tokens of experts")
    return counts


def context_group() -> Group:
    """Returns the ranks that share sequences. None if this rank is alone."""
    return parallel_state.get_context_parallel_group(check_initialized=False)


def replica_group() -> Group:
    """Returns the data-parallel and context-parallel ranks. None if this rank is alone.

    Raises:
        ParallelStateError: there are several ranks, and nothing says which of them have replicas.
    """
    if parallel_state.is_initialized():
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ParallelStateError(
            "moe_router_load_balancing_type 'global_aux_loss' counts tokens on all replicas, and core.parallel_state "
            "is not initialised; call initialize_model_parallel, or take 'aux_loss'"
        )
    return None


def add_auxiliary_losses(losses: Tensor, model: nn.Module, has_loss: Tensor | None = None) -> Tensor:
    """Adds the losses of the model's routers, of its last forward, to the gradient of every token's loss.

    `GPTModel` calls it where it is given labels. Call it yourself on losses that you compute from logits, before they
    are summed. The values of `losses` do not change: what is reported stays the loss of the model's predictions.

    Args:
        losses: losses of tokens, of any shape; with context parallelism of this rank's tokens.
        has_loss: False for tokens without a loss, such as those of label -100, in the shape of `losses`: a loop that
            sums their zeros gives them no weight. None: every token has one.
    """
    pending = [loss for module in model.modules() if (loss := take_pending(module)) is not None]
    if not pending or not torch.is_grad_enabled():
        return losses
    result: Tensor = _WithLosses.apply(losses, has_loss, context_group(), *pending)
    return result


def take_pending(module: nn.Module) -> Tensor | None:
    """Returns the loss that a router's last forwards left, and forgets it. None if there is none."""
    loss: Tensor | None = getattr(module, "pending_loss", None)
    if loss is not None:
        module.pending_loss = None  # type: ignore[assignment]
    return loss


def forget_losses(model: nn.Module) -> None:
    """Drops the losses of forwards that raised, or whose losses nothing added. `GPTModel` calls it first."""
    for module in model.modules():
        take_pending(module)


class _WithLosses(torch.autograd.Function):
    """Identity of its first argument. The gradients of `pending` are the sum of its gradient over tokens with a
    loss."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, has_loss: Tensor | None, group: Group, *pending: Tensor) -> Tensor:
        ctx.save_for_backward(has_loss)
        ctx.group, ctx.kinds = group, [(loss.dtype, loss.device) for loss in pending]
        return losses.clone()  # FSDP2 warns of outputs that are views

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (has_loss,) = ctx.saved_tensors
        grad_of_tokens = grad if has_loss is None else grad.masked_fill(~has_loss, 0.0)
        weight = grad_of_tokens.sum(dtype=torch.float64)
        # Masks may give the parts of a sequence different weights: each addend has that of the whole sequences.
        if group_size(ctx.group) > 1:
            all_reduce_by_backend(weight, ctx.group, what="the weight of losses of experts")
        return grad, None, None, *(weight.to(device, dtype) for dtype, device in ctx.kinds)
