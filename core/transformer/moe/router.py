"""The router of a layer: from hidden states over logits and scores to the experts of each token, and their load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import parallel_state
from ...base.errors import ParallelConfigError
from ...base.recomputation import noted
from ...tensor_parallel.groups import Group, group_size
from ...tensor_parallel.initialization import ParameterOwner, initialize_unless_deferred, mark_parameter
from ...tensor_parallel.random import CONTEXT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker
from ..moe_config import MoEConfig
from ..transformer_config import TransformerConfig
from . import load_balancing
from .router_replay import RouterReplay, settle

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_SMALLEST_SUM = 1e-20

SUMS = ("tokens", "dropped", "entropy", "micro_batches", "balance_loss", "z_loss")
"""What `TopKRouter.step_sums` has after the tokens of each expert."""


@torch.no_grad()
def best_experts(scores: Tensor, config: MoEConfig) -> Tensor:
    """Returns the indices of the best experts, of the best groups if there are any (DeepSeek-AI, 2024).

    The score of a group is the sum of as many of its best experts as a token takes from each group.
    """
    topk, groups, most = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    if groups is not None and most is not None:
        of_groups = scores.unflatten(-1, (groups, -1))  # [tokens, groups, experts of a group]
        score = of_groups.topk(topk // most, dim=-1).values.sum(-1)
        is_closed = torch.ones_like(score, dtype=torch.bool).scatter_(-1, score.topk(most, dim=-1).indices, False)
        scores = of_groups.masked_fill(is_closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(topk, dim=-1).indices


class TopKRouter(ParameterOwner):
    """Maps hidden states to experts and probabilities.

    Tensor-parallel ranks route the same tokens and use a part of each expert's output, or they route different tokens:
    their gradients are partial sums, which `finalize_model_grads` adds.

    Args:
        splits_tokens: tensor-parallel ranks route different tokens.

    Attributes:
        expert_bias: see `moe_router_enable_expert_bias`; `[experts]` in fp32. `MoELayer.use_step_sums` moves it once
            a step. None without that setting.
        step_sums: sums since the last step, over this rank's tokens, `[experts + 6]` in double: the tokens of each
            expert, before any is dropped, then `SUMS`. The backward of a training forward adds, so that a forward
            that raised leaves nothing; `clear_step` clears it.
        router_replay: what it records and replays, with `moe_enable_routing_replay`.
        global_counts: counts, on all replicas, of the step's micro-batches whose backward has come, `[experts]` in
            double, with "global_aux_loss". Added to and cleared as `step_sums`. Those of others are in their notes.
    """

    buffers_keep_dtype = True
    """Read by all other code that casts buffers (`apply_to_buffers`), as `_apply` does."""

    choose: Callable[[Tensor, MoEConfig], Tensor] = staticmethod(best_experts)
    """Returns the experts of each token, `[tokens, k]`, from the scores `[tokens, experts]`. An attribute, so that a
    router can be given another choice: the planner's is balanced."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    expert_bias: Tensor | None
    step_sums: Tensor
    global_counts: Tensor

    def __init__(self, config: TransformerConfig, tp_group: Group = None, *, splits_tokens: bool = False) -> None:
        super().__init__(tp_group)
        self.config, self.splits_tokens = config, splits_tokens
        experts = config.num_moe_experts or 0
        is_partial = group_size(self.tp_group) > 1
        shape = (experts, config.hidden_size)
        self.add_parameter("weight", shape, config.init_method, config=config, sequence_parallel=is_partial)
        mark_parameter(self, use_muon=False)
        shape_of_bias = (experts,) if config.add_bias_linear else None
        self.add_parameter("bias", shape_of_bias, nn.init.zeros_, config=config, sequence_parallel=is_partial)
        bias = torch.zeros(experts, dtype=torch.float32) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        sums = torch.zeros(experts + len(SUMS), dtype=torch.float64)
        self.register_buffer("step_sums", sums, persistent=False)
        self.register_buffer("global_counts", torch.zeros(experts, dtype=torch.float64), persistent=False)
        self.initializers.update({name: nn.init.zeros_ for name, state in self._buffers.items() if state is not None})
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        initialize_unless_deferred(self, config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[s, b, h]` to the probabilities `[s * b, k]` of each token's experts, and their indices."""
        config = self.config
        dtype = _DTYPES.get(config.moe_router_dtype or "", hidden.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(self._add_jitter(hidden).to(dtype), self.weight.to(dtype), bias)  # [s, b, experts]
        choose = partial(self._settle, hidden.shape)
        probs, experts = choose_experts(logits.flatten(0, 1), config, self.expert_bias, choose)
        if self.training and torch.is_grad_enabled():
            self._note(logits, probs, experts)
        return probs, experts

    @property
    def token_group(self) -> Group:
        """The ranks that route parts of the same sequences. None if this rank is alone."""
        if self.splits_tokens:
            return parallel_state.get_tensor_and_context_parallel_group()
        return load_balancing.context_group()

    def note_dropped(self, probs: Tensor, experts: Tensor) -> None:
        """Counts the choices `[tokens, k]` that `drop_over_capacity` has dropped in this step.

        Args:
            probs: as `forward` returned them.
        """
        if self.config.moe_expert_capacity_factor is not None and self.training and torch.is_grad_enabled():
            sums = torch.zeros_like(self.step_sums)
            sums[len(sums) - len(SUMS) + SUMS.index("dropped")] = experts.eq(len(self.weight)).sum()
            note = load_balancing.ForwardNote(None)
            noted(lambda: load_balancing.keep(self, probs, note, lambda: self.step_sums.add_(sums)))

    def clear_step(self) -> None:
        """Forgets the counts of a step. Losses that are to be trained stay, and so does what a backward will add."""
        self.step_sums.zero_()
        self.global_counts.zero_()
        for note in load_balancing.notes_of(self):
            note.counts_in_step = False

    def _settle(self, shape: torch.Size, scores: Tensor, config: MoEConfig) -> Tensor:
        return settle(self, scores, self.choose(scores, config), (shape[0], shape[1]))

    def _add_jitter(self, hidden: Tensor) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if eps is None or not self.training:
            return hidden
        stream = CONTEXT_PARALLEL_RNG if self.config.context_parallel_size > 1 else None
        if self.splits_tokens and group_size(self.tp_group) > 1:
            stream = MODEL_PARALLEL_RNG
        with nullcontext() if stream is None else get_rng_tracker().fork(stream):
            return hidden * torch.empty_like(hidden).uniform_(1 - eps, 1 + eps)

    def _note(self, logits: Tensor, probs: Tensor, experts: Tensor) -> None:
        """Computes the auxiliary losses, in a recomputation too. Keeps them and the load of the experts if it is
        none."""
        length, batch, num_experts = logits.shape
        shares = shares_of_experts(logits if self.config.auxiliary_losses else logits.detach(), self.config)
        loss, balance, of_logits, counts_on_replicas = self._auxiliary_losses(logits, shares, experts)

        @torch.no_grad()
        def keep() -> None:
            entropy = torch.special.entr(shares).sum()
            share = entropy.new_full((), 1 / group_size(self.token_group))
            others = [entropy.new_full((), length * batch), torch.zeros_like(entropy), entropy, share]
            counts = count_tokens(experts.flatten(), num_experts)
            sums = torch.cat([counts.double(), torch.stack([*others, balance, of_logits]).double()])
            note = load_balancing.ForwardNote(addend if loss.requires_grad else None, counts_on_replicas)

            def settle() -> None:
                self.step_sums += sums
                self.global_counts += note.counts
                note.counts = 0.0

            load_balancing.keep(self, probs, note, settle)

        # The gradients of tensor-parallel ranks are added. Each computes all of it, or its addend.
        addend = loss if self.splits_tokens else loss / group_size(self.tp_group)
        noted(keep)

    def _auxiliary_losses(
        self, logits: Tensor, shares: Tensor, experts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Returns this rank's addends: the sum of all losses times their coefficients, then the balancing losses and
        the loss of the logits without coefficients. With "global_aux_loss" also the tokens of each expert on all
        replicas, else 0.

        Args:
            logits, shares: `[s, b, experts]`.
        """
        config, (length, batch, num_experts) = self.config, logits.shape
        total = balance = of_logits = shares.new_zeros(())
        on_replicas: Tensor | float = 0.0
        group = self.token_group
        ranks = group_size(group)
        if config.auxiliary_losses:
            own_experts = experts.view(length, batch, -1)
            if self.expert_bias is not None or config.moe_router_num_groups is not None:
                own_experts = shares.detach().topk(config.moe_router_topk, dim=-1).indices
            per_sequence = count_tokens(own_experts.transpose(0, 1).flatten(1), num_experts)  # [b, experts]
            load_balancing.sum_counts(per_sequence, group)
        for kind, coefficient in config.auxiliary_losses.items():
            if kind == "seq_aux_loss":
                arguments = shares.transpose(0, 1), per_sequence, length * ranks
            else:
                counts = per_sequence.sum(0)
                if kind == "global_aux_loss":
                    on_replicas, counts = self._count_on_replicas(counts.double())
                arguments = shares.flatten(0, 1), counts, length * batch * ranks
            loss = load_balancing.switch_loss(*arguments, config.moe_router_topk)
            total, balance = total + coefficient * loss, balance + loss.detach()
        if config.moe_z_loss_coeff:
            loss = load_balancing.z_loss(logits, length * batch * ranks)
            total, of_logits = total + config.moe_z_loss_coeff * loss, loss.detach()
        return total, balance, of_logits, on_replicas

    def _count_on_replicas(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch's counts on all replicas, and their mean over replicas and the step's micro-batches up
        to this one.

        Args:
            own: `[experts]` in double, of all parts of the sequences.

        Raises:
            ParallelConfigError: torch's checkpoint recomputes the forward, whose counts are not known then.
        """

        def count() -> tuple[Tensor, Tensor]:
            shared = own / group_size(load_balancing.context_group())  # each part of a sequence adds its share
            load_balancing.sum_counts(shared, load_balancing.replica_group())
            total = self.global_counts + shared
            for note in load_balancing.notes_of(self):
                total = total + note.counts if note.counts_in_step else total
            return shared, total

        if (counts := noted(count)) is None:
            raise ParallelConfigError(
                "a forward with moe_router_load_balancing_type 'global_aux_loss' is recomputed by torch's checkpoint, "
                "which does not keep the counts that it read; take recompute_granularity, activation_checkpointing or "
                "shardstack.tensor_parallel.checkpoint"
            )
        shared, total = counts
        return shared, total * (own.sum() / total.sum().clamp(min=1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Moves the module. Its buffers keep their dtypes, because a cast would round the bias and the counts."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            new_buffer = self._buffers[name]
            if buffer is not None and new_buffer is not None and new_buffer.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(new_buffer.device)
        return self


def choose_experts(
    logits: Tensor,
    config: MoEConfig,
    expert_bias: Tensor | None = None,
    choose: Callable[[Tensor, MoEConfig], Tensor] = best_experts,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token.

    Args:
        logits: `[tokens, experts]`.
        expert_bias: `[experts]`, added to the scores for the choice alone.
        choose: picks the experts from the scores, as `TopKRouter.choose`.

    Returns:
        The probability of each chosen expert `[tokens, k]`, in the logits' dtype, and its index `[tokens, k]`.
    """
    topk = config.moe_router_topk
    if config.moe_router_score_function == "softmax":
        values = _widen(logits)
        if config.moe_router_pre_softmax:
            values = values.softmax(-1)
        experts = choose(values, config)
        probs = values.gather(1, experts)
        if not config.moe_router_pre_softmax:
            probs = probs.softmax(-1)
    else:
        scores = _scores(logits, config.moe_router_score_function)
        experts = choose(scores if expert_bias is None else scores + expert_bias, config)
        probs = scores.gather(1, experts)
        if topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + _SMALLEST_SUM)
    if config.moe_router_topk_scaling_factor is not None:
        probs = probs * config.moe_router_topk_scaling_factor
    return probs.to(logits.dtype), experts


def shares_of_experts(logits: Tensor, config: MoEConfig) -> Tensor:
    """Returns the scores of all experts, which add up to one for each token, `[tokens, experts]`: what balancing
    losses read."""
    scores = _scores(logits, config.moe_router_score_function)
    if config.moe_router_score_function == "softmax":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Counts tokens for each expert: `[..., k]` indices to `[..., experts]`, in int64."""
    counts = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(-1, experts, torch.ones_like(experts))


def _scores(logits: Tensor, function: str) -> Tensor:
    wide = _widen(logits)
    if function == "softmax":
        return wide.softmax(-1)
    return wide.sigmoid() if function == "sigmoid" else F.softplus(wide).sqrt()


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
