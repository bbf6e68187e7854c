"""Runs forward and backward of a step's micro-batches, with the interface of Megatron-LM's training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import parallel_state
from ..base.errors import ConfigError, ParallelConfigError
from ..base.megatron_names import absent_names, checks_arguments, refuse
from ..distributed import _BaseDataParallel
from ..process_groups_config import ProcessGroupCollection
from ..utils import get_model_config

ForwardStep = Callable[..., tuple[torch.Tensor, Callable[..., Any]]]
"""Takes the data iterator and the model. Returns the model's output, and a function from output to loss."""


@checks_arguments
def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Returns :func:`forward_backward_no_pipelining`, the schedule of one pipeline stage.

    Args:
        pp_size: pipeline stages; default is the size of the group of `core.parallel_state`.
        vp_size: number of stages of a rank with interleaving; only None is allowed.

    Raises:
        ParallelConfigError: there are several stages.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size() if pp_size is None else pp_size
    refuse("get_forward_backward_func", pp_size=(stages, 1, "models here have one pipeline stage"))
    return forward_backward_no_pipelining


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
        seq_length, micro_batch_size, decoder_seq_length, first_val_step, adjust_tensor_shapes_fn, p2p_communicator:
            Megatron-LM's arguments for messages between pipeline stages; not read.
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
    finalize = getattr(config, "finalize_model_grads_func", None)
    if finalize is not None and not forward_only:
        tokens = total_tokens if getattr(config, "calculate_per_token_loss", False) else None
        finalize([chunk], tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    return reports


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
            raise ParallelConfigError(f"{name} is a list of {len(value)}; a rank holds one pipeline stage, give one")
        return value[0]
    return value


__getattr__ = absent_names(__name__)
