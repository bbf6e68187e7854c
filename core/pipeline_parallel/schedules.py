"""Runs forward and backward of a step's micro-batches, with the interface of Megatron-LM's training loops.

Schedules over pipeline stages are those of `torch.distributed.pipelining` (`stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import parallel_state
from ..base import device
from ..base.errors import ConfigError, ParallelConfigError
from ..base.megatron_names import absent_names
from ..distributed import _BaseDataParallel
from ..process_groups_config import ProcessGroupCollection
from ..transformer.pipeline_stages import stage_index, stages_of
from ..utils import get_model_config
from .stages import run_stages

ForwardStep = Callable[..., tuple[torch.Tensor, Callable[..., Any]]]
"""Takes the data iterator and the model. Returns the model's output, and a function from output to loss."""


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Returns the function that runs a step over the pipeline stages.

    Args:
        pp_size: pipeline ranks; default is the size of the group of `core.parallel_state`.
        vp_size: stages of each rank; default is what `initialize_model_parallel` was given.

    Returns:
        :func:`forward_backward_no_pipelining` for one rank, else
        :func:`forward_backward_pipelining_without_interleaving`, or with virtual stages
        :func:`forward_backward_pipelining_with_interleaving`. They have the same arguments.
    """
    ranks = parallel_state.get_pipeline_model_parallel_world_size() if pp_size is None else pp_size
    if ranks == 1:
        return forward_backward_no_pipelining
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() if vp_size is None else vp_size
    if virtual is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Runs the micro-batches of a step, all but the last inside `no_sync`, and finishes the gradients.

    The loss function returns (loss, report), a mean over tokens; or (sum of losses, number of tokens, report), which
    is divided here unless the config has `calculate_per_token_loss`. From the model's config it reads
    `calculate_per_token_loss`, and functions that a training loop may set: `grad_scale_func`, called with each loss;
    `no_sync_func`, by default the wrapper's `no_sync`; and `finalize_model_grads_func`, called at the end.

    Args:
        forward_step_func: called as ``forward_step_func(data_iterator, model)``.
        data_iterator: iterator passed to `forward_step_func`, or a list of one.
        model: the wrapped model, or a list of one.
        num_microbatches: number of micro-batches in this step.
        seq_length, micro_batch_size: shape of a micro-batch, which messages between pipeline stages have; not read
            with one stage.
        decoder_seq_length, first_val_step, adjust_tensor_shapes_fn, p2p_communicator: Megatron-LM's arguments for
            messages between pipeline stages; not read.
        forward_only: run no backward, as in an evaluation.
        collect_non_loss_data: call the loss function with ``non_loss_data=True``, and return its results.
        pg_collection, force_all_reduce: passed to `finalize_model_grads_func`.

    Returns:
        the report of each micro-batch.

    Raises:
        ConfigError: there are several models or iterators, or no micro-batch.
    """
    chunk = _single("model", model)
    data = _single("data_iterator", data_iterator)
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}; it takes a positive number")
    config = get_model_config(chunk)
    no_sync: Callable[[], AbstractContextManager[Any]] = (
        getattr(config, "no_sync_func", None) or getattr(chunk, "no_sync", None) or nullcontext
    )
    if isinstance(chunk, _BaseDataParallel) and not forward_only:
        chunk.expect_micro_batches(num_microbatches)
    reports: list[Any] = []
    total_tokens: torch.Tensor | None = None
    for index in range(num_microbatches):
        is_last = forward_only or index == num_microbatches - 1
        with nullcontext() if is_last else no_sync():
            output, loss_func = forward_step_func(data, chunk)
            if collect_non_loss_data:
                reports.append(loss_func(output, non_loss_data=True))
                continue
            loss, tokens, report = _loss(loss_func(output), config, num_microbatches)
            reports.append(report)
            if tokens is not None:
                total_tokens = tokens if total_tokens is None else total_tokens + tokens
            if not forward_only:
                scale = getattr(config, "grad_scale_func", None)
                (loss if scale is None else scale(loss)).backward()
    _finalize([chunk], config, total_tokens, forward_only, pg_collection, force_all_reduce)
    return reports


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Runs a step over the pipeline stages by the config's `pipeline_schedule`. Every rank of the pipeline calls it.

    Arguments are those of :func:`forward_backward_no_pipelining`; `model` and `data_iterator` are lists of one for
    each of the rank's virtual stages. `forward_step_func` runs on every stage, with the same micro-batches in the same
    order. Models take the hidden states of the stage before them by `set_input_tensor`, and return theirs; on the last
    stage alone the loss function is called. Shapes are the same in all micro-batches.

    Returns:
        the report of each micro-batch on the rank with the last stage, else an empty list.

    Raises:
        ConfigError: see :func:`core.pipeline_parallel.stages.run_stages`.
        OutOfStepError: a neighbour sent nothing. Names stage, micro-batch and direction.
    """
    chunks: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    data: list[Any] = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator]
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}; it takes a positive number")
    if len(data) != len(chunks):
        raise ParallelConfigError(
            f"data_iterator has {len(data)} iterators for {len(chunks)} model chunks; give each chunk its own, over "
            "the same micro-batches"
        )
    config = get_model_config(chunks[0])
    rank, reports = parallel_state.get_pipeline_model_parallel_rank(), list[Any]()
    last = stages_of(config)[-1].index
    total_tokens = torch.zeros((), dtype=torch.int64, device=device.current_device())
    for chunk in chunks:
        if isinstance(chunk, _BaseDataParallel) and not forward_only:
            chunk.expect_micro_batches(num_microbatches)

    def run(chunk: nn.Module, index: int) -> torch.Tensor:
        nonlocal total_tokens
        output, loss_func = forward_step_func(data[index], chunk)
        if stage_index(config, rank, index) != last:
            return output
        if collect_non_loss_data:
            reports.append(loss_func(output, non_loss_data=True))
            return output
        loss, tokens, report = _loss(loss_func(output), config, num_microbatches)
        reports.append(report)
        if tokens is not None:
            total_tokens = total_tokens + tokens
        scale = getattr(config, "grad_scale_func", None)
        return loss if scale is None or forward_only else scale(loss)

    run_stages(
        chunks,
        run,
        num_microbatches,
        shape=(seq_length, micro_batch_size),
        forward_only=forward_only or collect_non_loss_data,
    )
    _finalize(chunks, config, total_tokens, forward_only, pg_collection, force_all_reduce)
    return reports


forward_backward_pipelining_with_interleaving = forward_backward_pipelining_without_interleaving
"""The same function under the name of Megatron-LM's schedule for several stages a rank."""


def _finalize(
    chunks: list[nn.Module],
    config: Any,
    total_tokens: torch.Tensor | None,
    forward_only: bool,
    pg_collection: ProcessGroupCollection | None,
    force_all_reduce: bool | None,
) -> None:
    """Calls the training loop's `finalize_model_grads_func`, if it has one and there are gradients."""
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not forward_only:
        tokens = total_tokens if getattr(config, "calculate_per_token_loss", False) else None
        finalize(chunks, tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _loss(
    outputs: tuple[Any, ...], config: Any, num_microbatches: int
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Returns the loss scaled for the sum over micro-batches, the number of tokens if it was given, and the report."""
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
    return loss * parallel_state.get_context_parallel_world_size() / num_microbatches, None, report


def _single(name: str, value: Any) -> Any:
    """Returns the only item of a list, or `value` if it is no list."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ParallelConfigError(f"{name} is a list of {len(value)}, and the pipeline has one stage; give one")
        return value[0]
    return value


__getattr__ = absent_names(__name__)
