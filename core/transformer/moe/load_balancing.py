"""Auxiliary losses that balance experts, and how they join the loss of a model.

A loss of experts is added to the loss of every token of its micro-batch: whatever a training loop does with the losses
of tokens (means, sums, masks, loss scales, accumulation, means over ranks), it does with this one, so that a
coefficient means the same everywhere. Megatron-LM and Hugging Face set its scale next to that of the main loss; see
`docs/experts.md`.

Each context-parallel rank computes an addend, from the scores of its own tokens and the counts of all: the addends of
the ranks that share sequences add up to the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import parallel_state
from ...base.errors import ConfigError, ParallelStateError, warn_once
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
    per_batch = (shares.sum(-2) * counts.to(shares.dtype)).sum(-1) * (experts / (topk * num_tokens**2))
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
            "moe_router_load_balancing_type 'global_aux_loss' counts tokens on all replicas, and "
            "shardstack.parallel_state is not initialised; call initialize_model_parallel, or take 'aux_loss'"
        )
    return None


@dataclass(eq=False)
class ForwardNote:
    """What a forward has noted of its routing. Its graph alone holds it: of a forward that raised, or whose output is
    gone, nothing is left."""

    loss: Tensor | None
    """Auxiliary losses, times their coefficients, until they are taken."""
    counts: Tensor | float = 0.0
    """Tokens of each expert on all replicas, `[experts]`, with "global_aux_loss", until its backward has come."""
    counts_in_step: bool = True
    """Whether the step under way is the forward's: other forwards of the step add the counts to theirs."""
    forward: int = field(default_factory=lambda: _forward)
    """Number of the model's forward, which `begin_forward` began."""


_forward = 0
"""Number of the last forward of a model that has begun in this process. Only `begin_forward` sets it."""

_notes: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[ForwardNote]]] = weakref.WeakKeyDictionary()
"""The notes of each module. `keep` adds, and drops the dead. No state of the module: a copy has none."""


def begin_forward() -> None:
    """Begins a forward of a model, which keeps its losses apart from those of other forwards."""
    global _forward
    _forward += 1


def notes_of(module: nn.Module) -> list[ForwardNote]:
    """Returns what the forwards of a module have noted whose graphs exist, the first one first."""
    return [note for reference in _notes.get(module, ()) if (note := reference()) is not None]


def keep(module: nn.Module, output: Tensor, note: ForwardNote, settle: Callable[[], object]) -> None:
    """Keeps a note of a module's forward while the graph of `output` exists.

    Args:
        settle: called once, when the gradient of `output` is there. At once if it has none, as in frozen layers.
    """
    waiting = [settle]

    def come(_: Tensor | None = None) -> None:
        while waiting:  # another backward through a kept graph counts nothing
            waiting.pop()()
        if note.loss is not None:
            note.loss = None
            warn_once(
                "losses that balance experts were computed and not trained: the model was called without labels; give "
                "it labels, or call shardstack.transformer.moe.add_auxiliary_losses(losses, model) on the losses of "
                "tokens"
            )

    _notes[module] = [weakref.ref(alive) for alive in [*notes_of(module), note]]
    if output.requires_grad:
        output.register_hook(come)
    else:
        come()


def add_auxiliary_losses(losses: Tensor, model: nn.Module, has_loss: Tensor | None = None) -> Tensor:
    """Adds the losses of the model's routers, of its last forward with gradients, to the gradient of every token's
    loss.

    `GPTModel` calls it where it is given labels. Call it yourself on losses that you compute from logits, before they
    are summed, after each forward with gradients. The values of `losses` do not change: what is reported stays the
    loss of the model's predictions.

    Args:
        losses: losses of tokens, of any shape; with context parallelism of this rank's tokens.
        has_loss: False for tokens without a loss, such as those of label -100, in the shape of `losses`: a loop that
            sums their zeros gives them no weight. None: every token has one.

    Raises:
        ConfigError: the losses of several forwards wait, and nothing says which of them belong to `losses`.
    """
    waiting = {note.forward for module in model.modules() for note in notes_of(module) if note.loss is not None}
    if len(waiting) > 1:
        raise ConfigError(
            f"add_auxiliary_losses was called once for {len(waiting)} forwards, whose losses have weights of their "
            "own; call it after each forward, on the losses of its tokens, or give the model labels; run forwards "
            "that are not trained under torch.no_grad()"
        )
    return add_pending(losses, pop_balance_losses(model, *waiting), has_loss)


def add_pending(losses: Tensor, pending: list[Tensor], has_loss: Tensor | None = None) -> Tensor:
    """Adds `pending` to the gradient of every element of `losses`."""
    if not pending or not torch.is_grad_enabled():
        return losses
    output: Tensor = _WithLosses.apply(losses, has_loss, context_group(), *pending)
    return output


def pop_balance_losses(model: nn.Module, forward: int | None = None) -> list[Tensor]:
    """Returns the losses that a forward left in a model's modules, and forgets them.

    Args:
        forward: number of the forward; None means the last.
    """
    number = _forward if forward is None else forward
    return [loss for module in model.modules() if (loss := pop_balance_loss(module, number)) is not None]


def pop_balance_loss(module: nn.Module, forward: int | None = None) -> Tensor | None:
    """Returns the sum of the losses that a forward left in one module, and forgets them. None if there is no loss.

    Args:
        forward: number of the forward; None means all forwards.
    """
    total: Tensor | None = None
    for note in notes_of(module):
        if note.loss is not None and forward in (None, note.forward):
            total, note.loss = note.loss if total is None else total + note.loss, None
    return total


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
