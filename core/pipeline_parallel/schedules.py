"""Runs forward and backward of a step's micro-batches, with the interface of Megatron-LM's training loops.

Schedules over pipeline stages are those of `torch.distributed.pipelining` (`stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import parallel_state
from ..base import device
from ..base.errors import ConfigError, ParallelConfigError, check_positive
from ..base.megatron_names import absent_names, checks_arguments
from ..distributed import _BaseDataParallel
from ..process_groups_config import ProcessGroupCollection
from ..transformer.pipeline_stages import stage_index, stages_of
from ..utils import get_model_config
from .stages import run_micro_batches

ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any]]]
"""Takes the data iterator and the model. Returns the model's output, and a function from output to loss."""


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Returns the function that runs a step over the pipeline stages.

    Args:
        pp_size, vp_size: Megatron-LM's arguments; not read.

    Returns:
        :func:`forward_backward`, whatever the arguments: the schedule is that of the model's config.
    """
    return forward_backward


@checks_arguments
def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Runs the micro-batches of a step, and finishes the gradients. Every rank of a pipeline calls it.

    With one pipeline stage all micro-batches but the last run inside `no_sync`. Several follow the config's
    `pipeline_schedule`: `forward_step_func` runs on every stage, with the same micro-batches in the same order. Models
    take the hidden states of the stage before them by `set_input_tensor`, and return theirs; the loss function is
    called on the last stage alone.

    The loss function returns (loss, report), a mean over tokens; or (sum of losses, number of tokens, report), which
    is divided here unless the config has `calculate_per_token_loss`. From the model's config it reads
    `calculate_per_token_loss`, and functions that a training loop may set: `grad_scale_func`, called with each loss;
    `no_sync_func`, by default the wrapper's `no_sync`; and `finalize_model_grads_func`, called at the end.

    Args:
        forward_step_func: called as ``forward_step_func(data_iterator, model)``.
        data_iterator: iterator passed to `forward_step_func`, or a list of one for each model.
        model: the wrapped model, or a list of one for each of the rank's virtual stages.
        num_microbatches: number of micro-batches in this step.
        seq_length, micro_batch_size: shape of all micro-batches, which messages between pipeline stages have; not read
            with one stage.
        decoder_seq_length, first_val_step, adjust_tensor_shapes_fn, p2p_communicator: Megatron-LM's arguments for
            messages between pipeline stages; not read.
        forward_only: run no backward, as in an evaluation.
        collect_non_loss_data: call the loss function with ``non_loss_data=True``, and return its results.
        pg_collection, force_all_reduce: passed to `finalize_model_grads_func`.

    Returns:
        the report of each micro-batch on the rank with the last stage, else an empty list.

    Raises:
        ConfigError: not a model and an iterator for each stage, or no micro-batch; see also
            :func:`shardstack.pipeline_parallel.stages.run_stages`.
        OutOfStepError: a neighbour sent nothing. Names stage, micro-batch and direction.
    """
    check_positive({"num_microbatches": num_microbatches})
    chunks, data = _of_chunks(model, data_iterator)
    config, reports = get_model_config(chunks[0]), list[Any]()
    stages = stages_of(config) if parallel_state.get_pipeline_model_parallel_world_size() > 1 else None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    total_tokens = torch.zeros((), dtype=torch.int64, device=device.current_device())
    for chunk in chunks:
        if isinstance(chunk, _BaseDataParallel) and not forward_only:
            chunk.expect_micro_batches(num_microbatches)

    def run(chunk: nn.Module, index: int) -> Tensor:
        nonlocal total_tokens
        output, loss_func = forward_step_func(data[index], chunk)
        if stages and stages[stage_index(config, rank, index)] is not stages[-1]:
            return output
        if collect_non_loss_data:
            reports.append(loss_func(output, non_loss_data=True))
            return output
        loss, tokens, report = _loss(loss_func(output), config, num_microbatches)
        reports.append(report)
        total_tokens = total_tokens + tokens
        scale = getattr(config, "grad_scale_func", None)
        return loss if scale is None or forward_only else scale(loss)

    shape, without_backward = (seq_length, micro_batch_size), forward_only or collect_non_loss_data
    run_micro_batches(chunks, run, num_microbatches, shape=shape, forward_only=without_backward)
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not forward_only:
        counts = total_tokens if getattr(config, "calculate_per_token_loss", False) else None
        finalize(chunks, counts, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    return reports


# Megatron-LM's names of it.
forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward


def _of_chunks(model: Any, data_iterator: Any) -> tuple[list[Any], list[Any]]:
    """Returns the rank's model chunks and an iterator for each.

    Raises:
        ParallelConfigError: several for one pipeline stage, or not as many of both.
    """
    chunks, data = (list(given) if isinstance(given, (list, tuple)) else [given] for given in (model, data_iterator))
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    for name, values in (("model", chunks), ("data_iterator", data)):
        if not has_stages and len(values) != 1:
            raise ParallelConfigError(f"{name} is a list of {len(values)}, and the pipeline has one stage; give one")
    if len(data) != len(chunks):
        raise ParallelConfigError(
            f"data_iterator has {len(data)} iterators for {len(chunks)} model chunks; give each its own, of equal data"
        )
    return chunks, data


def _loss(outputs: tuple[Any, ...], config: Any, num_microbatches: int) -> tuple[Tensor, Tensor | int, Any]:
    """Returns the loss scaled for the sum over micro-batches, the number of tokens or 0, and the report."""
    if len(outputs) == 3:
        loss, tokens, report = outputs
        tokens = torch.as_tensor(tokens)
        if not getattr(config, "calculate_per_token_loss", False):
            loss = loss / tokens.clamp(min=1) / num_microbatches
        return loss, tokens.detach().clone(), report
    if len(outputs) != 2:
        raise ConfigError(f"the loss function returned {len(outputs)} values; it takes two or three")
    if getattr(config, "calculate_per_token_loss", False):
        raise ConfigError("calculate_per_token_loss is set, and the loss function returned no number of tokens")
    loss, report = outputs
    # As in Megatron-LM: such a loss is one over all parts of the sequence, whose wrappers average their gradients.
    return loss * parallel_state.get_context_parallel_world_size() / num_microbatches, 0, report


__getattr__ = absent_names(__name__)
