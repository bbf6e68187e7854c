"""One optimizer step over its micro-batches, its result, which the host reads later, and one validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base import device
from ..base.errors import ShardstackError
from ..comm.collectives import all_reduce_by_backend
from ..comm.host_read import HostRead
from ..diagnostics import failures_explained
from ..distributed import _BaseDataParallel, finalize_model_grads
from ..optimizer import MegatronOptimizer, OptimizerParamScheduler
from ..optimizer.exact_sums import exact_totals
from ..optimizer.optimizer import StepOutcome
from ..tensor_parallel.random import MicroBatchSeeds
from ..transformer.context_parallel import own_chunks
from ..transformer.document_masks import PackedDocuments
from ..transformer.moe.step import logged_statistics
from .data import Batch, to_device


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step, equal on all ranks."""

    loss: float
    """Mean loss in nats per token: over all tokens with `calculate_per_token_loss`, else the mean over
    micro-batches."""

    updated: bool
    """False if gradients overflowed and the step was skipped."""

    grad_norm: float | None
    """Global norm of the gradient before clipping."""

    num_zeros: int | None
    """Zeros in the gradient. None if the optimizer does not count them."""

    stop: bool
    """Whether any rank was asked to stop."""

    lr: float
    """Largest learning rate of the update."""

    loss_scale: float
    """The factor that losses were multiplied by before backward."""

    experts: Mapping[str, float] = field(default_factory=dict)
    """Balance of experts, by the names of `core.transformer.moe.step`. Empty for a model without experts."""


class RunningStep:
    """A step that is queued. The device may still compute it, and decides whether it is skipped.

    The host learns the result when it asks for it, or when the next step needs to know it: before its update, or
    before its first backward where the loss scale adapts. Then the schedule moves on.

    Args:
        totals: over all ranks: sum of losses, what to divide it by, how many ranks were asked to stop, and what
            `names` say.
        names: names of the rest of `totals`, for the log.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        totals: torch.Tensor,
        names: Sequence[str] = (),
    ) -> None:
        self._optimizer, self._scheduler, self._names = optimizer, scheduler, names
        # None until the host knows the outcome: the optimizer then calls `_conclude`, which sets it once.
        self._result: StepResult | None = None
        optimizer.start_step(totals, concluded=self._conclude)

    def _conclude(self, outcome: StepOutcome) -> None:
        if outcome.updated:
            self._scheduler.step(1)
        total_loss, total_weight, stops, *others = outcome.report
        scaled = self._optimizer.grad_scaler is not None
        counts = self._optimizer.config.log_num_zeros_in_grad and (outcome.updated or not scaled)
        self._result = StepResult(
            loss=total_loss / max(total_weight, 1.0),
            updated=outcome.updated,
            grad_norm=outcome.grad_norm if outcome.updated or not scaled else None,
            num_zeros=outcome.num_zeros if counts else None,
            stop=stops > 0,
            lr=outcome.lr,
            loss_scale=outcome.loss_scale,
            experts=dict(zip(self._names, others, strict=True)),
        )

    def result(self) -> StepResult:
        """Returns the result, after waiting for the device if it is not known yet.

        Raises:
            OutOfStepError: not all ranks took part in the step.
        """
        if self._result is None:
            self._optimizer.finish_step()
        if self._result is None:
            raise ShardstackError("the step's update was never queued: train_step raised; its error says why")
        return self._result


def train_step(
    model: _BaseDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Iterator[Batch],
    num_microbatches: int,
    *,
    stop_requested: bool = False,
    seeds: MicroBatchSeeds | None = None,
) -> RunningStep:
    """Queues one optimizer step in Megatron-LM's order. All ranks call it together.

    The host does not wait for the device, but for the result of the step before. All that is read from the device is
    in one copy: loss, gradient norm, whether the update was skipped, and whether to stop.

    Each micro-batch's loss is divided by `num_microbatches`, and the wrapper averages over ranks. Context-parallel
    ranks divide by the number of tokens in their whole sequences, so that tokens have equal weights on all ranks. With
    `calculate_per_token_loss` losses are summed, and `finalize_model_grads` divides by the number of tokens of all
    micro-batches and ranks.

    Where the wrapper computes the same bits on any number of ranks (`Plan.tree`), each loss is divided by the
    number of micro-batches on all ranks, which does not depend on the number of ranks; and reported losses are added
    exactly.

    Args:
        batches: this rank's micro-batches; takes `num_microbatches` of them, copied to the device if they are
            not there (`DeviceBatches`).
        stop_requested: whether this rank was asked to stop; the ranks agree on it in the all-reduce of the loss.
        seeds: of dropout, by micro-batch; None lets random streams run on.
    """
    per_token = model.sums_gradients
    tree, group = model.plan.tree, model.process_group
    model.expect_micro_batches(num_microbatches, divides_by_ranks=tree is None)
    share = num_microbatches if tree is None else num_microbatches * group.size()
    rows: list[torch.Tensor] = []
    loss_sum = torch.zeros((), dtype=torch.float64, device=device.current_device())
    num_tokens = torch.zeros_like(loss_sum)

    with failures_explained(model):
        model.zero_grad_buffer()
        for i in range(num_microbatches):
            sequences = next(batches)
            batch = _own_chunks(sequences)
            if seeds is not None:
                seeds.enter(model.micro_batch_index(i))
            with model.no_sync() if i < num_microbatches - 1 else nullcontext():
                masked_sum, tokens = _masked_loss(model, batch)
                loss = masked_sum if per_token else masked_sum / _tokens_a_rank(sequences) / share
                optimizer.scale_loss(loss).backward()
            loss_sum += loss.detach()
            num_tokens += tokens
            if tree is not None:
                rows.append(torch.stack([loss.detach().double(), tokens.double()]))
        finalize_model_grads([model], num_tokens if per_token else None)

        # Queued before the update: behind it, it would wait for the parameters that ranks exchange after it.
        weight = num_tokens if per_token else torch.ones_like(loss_sum)
        totals = torch.stack([loss_sum, weight, torch.full_like(loss_sum, float(stop_requested))])
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        all_reduce_by_backend(totals, replicas, what="the loss")
        if dist.get_world_size() > parallel_state.get_data_parallel_world_size(with_context_parallel=True):
            # Ranks of one model also get different signals, and the data-parallel sum above does not include them.
            all_reduce_by_backend(totals[2:], what="the stop flag", op=dist.ReduceOp.MAX)
        if tree is not None:
            exact = exact_totals(rows, group)
            totals[:2] = exact if per_token else torch.stack([exact[0], torch.ones_like(exact[1])])
        names, statistics = logged_statistics(model) or ((), totals[:0])
        return RunningStep(optimizer, scheduler, torch.cat([totals, statistics]), names)


@torch.no_grad()
def evaluate(model: _BaseDataParallel, batches: Iterator[Batch], num_batches: int) -> float:
    """Returns the mean loss in nats per token over `num_batches` micro-batches of every rank, without dropout."""
    rows: list[torch.Tensor] = []
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_batches):
            masked_sum, tokens = _masked_loss(model, _own_chunks(next(batches)))
            rows.append(torch.stack([masked_sum.double(), tokens.double()]))
    finally:
        model.train(was_training)
    total_loss, total_tokens = HostRead(exact_totals(rows, model.process_group)).wait()
    return total_loss / max(total_tokens, 1.0)


def _tokens_a_rank(batch: Batch) -> torch.Tensor:
    """Returns the number of unmasked tokens of whole sequences, divided by the context-parallel ranks that share
    them."""
    return batch["loss_mask"].sum().clamp(min=1) / parallel_state.get_context_parallel_world_size()


def _masked_loss(model: _BaseDataParallel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of unmasked losses and their number, both 0-dim, on the device."""
    packed = {}
    if "document_starts" in batch:  # read here: FSDP2 would move it to the device
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        packed["documents"] = PackedDocuments(batch["document_starts"], rank, size)
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **packed)  # [b, s / cp]
    mask = batch["loss_mask"]
    return (losses.float() * mask).sum(), mask.sum()


def _own_chunks(batch: Batch) -> Batch:
    """Returns this rank's chunks of a batch, on the device.

    Copies to the device before it cuts: cutting on the host would give tensors that are not pinned, and the host would
    wait for their copies.
    """
    return {name: own_chunks(tensor) for name, tensor in to_device(batch).items()}
