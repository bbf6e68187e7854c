"""One optimizer step over its micro-batches, its result, which the host reads later, and one validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import torch
import torch.distributed as dist

from .. import parallel_state
from ..base import device
from ..base.errors import ShardstackError
from ..comm.collectives import all_reduce_by_backend
from ..comm.lane import HostRead
from ..diagnostics import failures_explained
from ..distributed import _BaseDataParallel, finalize_model_grads
from ..distributed.finalize_model_grads import is_last_stage, sum_of_last_stage
from ..optimizer import MegatronOptimizer
from ..optimizer.exact_sums import exact_totals
from ..optimizer.grad_scaler import StepOutcome
from ..optimizer_param_scheduler import OptimizerParamScheduler
from ..pipeline_parallel.stages import run_micro_batches
from ..tensor_parallel.random import MicroBatchSeeds
from ..transformer.moe.moe_layer import logged_statistics
from ..transformer.sequences import PackedDocuments, own_chunks
from .data import Batch, to_device

TIME_IS_OVER = 1 << 32
"""What a rank adds to the number of ranks that were asked to stop, for all ranks to give the same reason."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step, equal on all ranks."""

    loss: float
    """Mean loss in nats per token: over all tokens with `calculate_per_token_loss`, else the mean over
    micro-batches."""

    has_update: bool
    """False if gradients overflowed and the step was skipped."""

    grad_norm: float | None
    """Global norm of the gradient before clipping."""

    num_zeros: int | None
    """Zeros in the gradient. None if the optimizer does not count them."""

    stop: bool
    """Whether any rank was asked to stop, or finds that the run's time is over."""

    is_late: bool = False
    """Whether any rank finds that the run's time is over."""

    lr: float
    """Largest learning rate of the update."""

    loss_scale: float
    """The factor that losses were multiplied by before backward."""

    experts: Mapping[str, float] = field(default_factory=dict)
    """Balance of experts, by the names of `shardstack.transformer.moe.moe_layer`. Empty for a model without
    experts."""


class RunningStep:
    """A step that is queued. The device may still compute it, and decides whether it is skipped.

    The host learns the result when it asks for it, or when the next step needs to know it: before its update, or
    before its first backward where the loss scale adapts. Then the schedule moves on.

    Args:
        totals: over all ranks: sum of losses, what to divide it by, how many ranks were asked to stop (or
            `TIME_IS_OVER`), and what `names` say.
        names: names of the rest of `totals`, for the log.
        increment: what the step counts in the schedule's unit.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        totals: torch.Tensor,
        names: Sequence[str] = (),
        increment: int = 1,
    ) -> None:
        self._optimizer, self._scheduler, self._names, self._increment = optimizer, scheduler, names, increment
        # None until the host knows the outcome: the optimizer then calls `_conclude`, which sets it once.
        self._result: StepResult | None = None
        optimizer.start_step(totals, on_outcome=self._conclude)

    def _conclude(self, outcome: StepOutcome) -> None:
        if outcome.has_update:
            self._scheduler.step(self._increment)
        total_loss, total_weight, stops, *others = outcome.report
        has_scaler = self._optimizer.grad_scaler is not None
        counts = self._optimizer.config.log_num_zeros_in_grad and (outcome.has_update or not has_scaler)
        self._result = StepResult(
            loss=total_loss / max(total_weight, 1.0),
            has_update=outcome.has_update,
            grad_norm=outcome.grad_norm if outcome.has_update or not has_scaler else None,
            num_zeros=outcome.num_zeros if counts else None,
            stop=stops > 0,
            is_late=stops >= TIME_IS_OVER,
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
    model: _BaseDataParallel | Sequence[_BaseDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    batches: Iterator[Batch],
    num_microbatches: int,
    *,
    stop_requested: int = 0,
    seeds: MicroBatchSeeds | None = None,
    before_update: Callable[[], None] = lambda: None,
    increment: int = 1,
) -> RunningStep:
    """Queues one optimizer step in Megatron-LM's order. All ranks call it together.

    The host waits for the result of the step before alone. What it reads from the device is one copy.

    Each micro-batch's loss is divided by `num_microbatches`, and the wrapper averages over ranks. Context-parallel
    ranks divide by the tokens in their whole sequences, so that tokens have equal weights on all ranks. With
    `calculate_per_token_loss` losses are summed, and `finalize_model_grads` divides by the tokens of the whole step.

    Where the wrapper computes the same bits on any number of ranks (`Plan.tree`), each loss is divided by the number
    of micro-batches on all ranks, and reported losses are added exactly.

    Args:
        model: the wrapped model, or this rank's pipeline stages. All stages of a pipeline read the same batches.
        batches: this rank's micro-batches, which are copied to the device if they are not there (`DeviceBatches`).
        stop_requested: 1 if this rank was asked to stop, `TIME_IS_OVER` if the run's time is over, else 0. The ranks
            agree on it in the all-reduce of the loss.
        seeds: of dropout, by micro-batch; None lets random streams run on.
        before_update: called before the step's last collective of all ranks and its update.
        increment: what the step counts in the schedule's unit: 1 iteration, or its samples.
    """
    chunks = _chunks(model)
    wrapper, per_token = chunks[0], chunks[0].plan.sums_gradients
    tree, group = wrapper.plan.tree, wrapper.process_group
    share = num_microbatches if tree is None else num_microbatches * group.size()
    rows: list[torch.Tensor] = []
    loss_sum, num_tokens = torch.zeros(2, dtype=torch.float64, device=device.current_device()).unbind()

    def take(masked_sum: torch.Tensor, tokens: torch.Tensor, sequences: Batch) -> torch.Tensor:
        loss = masked_sum if per_token else masked_sum / _tokens_a_rank(sequences) / share
        loss_sum.add_(loss.detach())
        num_tokens.add_(tokens)
        if tree is not None:
            rows.append(torch.stack([loss.detach().double(), tokens.double()]))
        return optimizer.scale_loss(loss)

    with failures_explained(wrapper):
        for chunk in chunks:
            chunk.expect_micro_batches(num_microbatches, divides_by_ranks=tree is None)
            chunk.zero_grad_buffer()
        _run_batches(chunks, batches, num_microbatches, take, seeds=seeds)
        finalize_model_grads(chunks, num_tokens if per_token else None)
        before_update()
        # Queued before the update: behind it, it would wait for the parameters that ranks exchange after it.
        weight = num_tokens if per_token else torch.ones_like(loss_sum)
        totals = _over_ranks(torch.stack([loss_sum, weight, torch.full_like(loss_sum, float(stop_requested))]))
        if tree is not None:
            exact = exact_totals(rows or [totals.new_zeros(2)] * num_microbatches, group)
            totals[:2] = exact if per_token else torch.stack([exact[0], torch.ones_like(exact[1])])
        sum_of_last_stage(totals[:2], chunks)
        names, statistics = logged_statistics(chunks) or ((), totals[:0])
        return RunningStep(optimizer, scheduler, torch.cat([totals, statistics]), names, increment)


def _over_ranks(totals: torch.Tensor) -> torch.Tensor:
    """Returns the sum of losses and of weights over replicas, and how many ranks were asked to stop."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    all_reduce_by_backend(totals, replicas, what="the loss")
    if dist.get_world_size() > replicas.size():
        # Ranks of one model also get different signals, and the data-parallel sum above does not include them.
        all_reduce_by_backend(totals[2:], what="the stop flag", op=dist.ReduceOp.MAX)
    return totals


@torch.no_grad()
def evaluate(
    model: _BaseDataParallel | Sequence[_BaseDataParallel],
    batches: Iterator[Batch],
    num_batches: int,
    num_microbatches: int = 1,
) -> float:
    """Returns the mean loss in nats per token over `num_batches` micro-batches of every rank, without dropout.

    Args:
        model, batches: as of `train_step`.
        num_microbatches: micro-batches that pipeline stages have under way, a divisor of `num_batches`.
    """
    chunks = _chunks(model)
    rows: list[torch.Tensor] = []

    def take(masked_sum: torch.Tensor, tokens: torch.Tensor, sequences: Batch) -> torch.Tensor:
        rows.append(torch.stack([masked_sum.double(), tokens.double()]))
        return masked_sum

    were_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    at_once = num_microbatches if parallel_state.get_pipeline_model_parallel_world_size() > 1 else num_batches
    try:
        for _ in range(num_batches // at_once):
            _run_batches(chunks, batches, at_once, take, forward_only=True)
    finally:
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.train(was_training)
    rows = rows or [torch.zeros(2, dtype=torch.float64, device=device.current_device())]  # not the last stage
    totals = exact_totals(rows, chunks[0].process_group)
    sum_of_last_stage(totals, chunks)
    total_loss, total_tokens = HostRead(totals).wait()
    return total_loss / max(total_tokens, 1.0)


def _chunks(model: _BaseDataParallel | Sequence[_BaseDataParallel]) -> list[_BaseDataParallel]:
    return [model] if isinstance(model, _BaseDataParallel) else list(model)


def _run_batches(
    chunks: Sequence[_BaseDataParallel],
    batches: Iterator[Batch],
    num_microbatches: int,
    take: Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor],
    *,
    seeds: MicroBatchSeeds | None = None,
    forward_only: bool = False,
) -> None:
    """Runs a step's micro-batches over the chunks.

    Args:
        take: gets the sum of unmasked losses, their number, both 0-dim, and the batch in whole sequences. Returns the
            loss that backward starts from.
    """
    inputs, (batch_size, length) = [batches], (0, 0)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        step = [next(batches) for _ in range(num_microbatches)]  # each chunk has its turn several times
        inputs, (batch_size, length) = [iter(step) for _ in chunks], step[0]["tokens"].shape
    numbers = [count() for _ in chunks]

    def run(chunk: torch.nn.Module, index: int) -> torch.Tensor:
        sequences = next(inputs[index])
        batch = _own_chunks(sequences)
        if seeds is not None:
            seeds.enter(chunks[index].micro_batch_index(next(numbers[index])))
        output = _forward(chunk, batch)
        return take(*_masked_loss(output, batch), sequences) if is_last_stage(chunk) else output

    run_micro_batches(chunks, run, num_microbatches, shape=(length, batch_size), forward_only=forward_only)


def _tokens_a_rank(batch: Batch) -> torch.Tensor:
    """Returns the number of unmasked tokens of whole sequences, divided by the context-parallel ranks that share
    them."""
    return batch["loss_mask"].sum().clamp(min=1) / parallel_state.get_context_parallel_world_size()


def _forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the losses of tokens, `[b, s / cp]`, or the hidden states of a pipeline stage before the last."""
    documents = {}
    if "document_starts" in batch:  # read here: FSDP2 would move it to the device
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        documents["documents"] = PackedDocuments(batch["document_starts"], rank, size)
    return cast(torch.Tensor, model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **documents))


def _masked_loss(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of unmasked losses, of `[b, s / cp]`, and their number, both 0-dim, on the device."""
    mask = batch["loss_mask"]
    return (losses.float() * mask).sum(), mask.sum()


def _own_chunks(batch: Batch) -> Batch:
    """Returns this rank's chunks of a batch, on the device.

    Copies to the device before it cuts: cutting on the host would give tensors that are not pinned, and the host would
    wait for their copies.
    """
    return {name: own_chunks(tensor) for name, tensor in to_device(batch).items()}
