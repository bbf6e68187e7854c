"""Lists the tensors that FSDP2 holds for a model at this moment.

Relies on the fields of torch that own them. One more, or one renamed, and a table of memory counts them as
activations, or asking for it raises; no number of a training changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...._torch_compat import fsdp_param_groups
from .states import fsdp_parameters, param_groups, state_of


def gathered_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yields what holds gathered parameters now: whole ones, those of partial reshards, and running gathers."""
    for group in param_groups(root):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs
            if (partial := getattr(parameter, "_sharded_post_forward_param_data", None)) is not None:
                yield partial
        last = group.comm_ctx.all_gather_state
        for result in (group._all_gather_result, None if last is None else last.all_gather_result):
            if result is not None:
                yield result.all_gather_output


def gathered_tensors_of(module: FSDPModule) -> list[torch.Tensor]:
    """Returns the tensors that one unit is gathered into; empty before its first gather.

    Torch makes each once, and frees a unit by resizing their storages: made anew, `SavedWeights` would not find them.
    """
    groups = fsdp_param_groups(state_of(module))  # type: ignore[arg-type]
    return [output for group in groups for parameter in group.fsdp_params for output in parameter.all_gather_outputs]


def gradient_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yields what holds gradients now: sharded ones, whole ones that are not reduced yet, and running reductions."""
    for group in param_groups(root):
        for parameter in group.fsdp_params:
            held = (parameter.sharded_param.grad, parameter.unsharded_accumulated_grad)
            yield from (tensor for tensor in held if tensor is not None)
        yield from (state.reduce_scatter_input for state in _reductions_under_way(group.comm_ctx))
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
    for parameter in gathered_parameters(root):
        if parameter.grad is not None:
            yield parameter.grad


def shard_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yields this rank's shards, with their padding."""
    for group in param_groups(root):
        for parameter in group.fsdp_params:
            yield parameter._sharded_param_data


def gathered_parameters(root: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that modules compute with, and autograd gives gradients to; none before the first
    all-gather."""
    for parameter in fsdp_parameters(root):
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param


def _reductions_under_way(comm_ctx: Any) -> list[Any]:
    """Returns torch's running reductions; torch before 2.13 keeps one and later versions a list."""
    states = getattr(comm_ctx, "reduce_scatter_states", None)
    if states is None:
        states = [comm_ctx.reduce_scatter_state]
    return [state for state in states if state is not None]
