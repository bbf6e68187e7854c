"""Gradients that a sharded model holds whole, because `no_sync` kept them on this rank.

FSDP2 reduces a unit's gradient from the backward hook that produced it. After a last micro-batch inside `no_sync`, or
one that did not reach every unit, whole gradients are left over; torch has no public way to reduce or to drop them.
This file alone reads FSDP2's private state, and its tests pin what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .._torch_compat import fsdp_param_groups
from .explain.memory_table import GATHERED, GRADIENTS, PARAMETERS, WHOLE_GRADIENTS


def reduce_unsharded_gradients(root: nn.Module) -> None:
    """Reduces what is left over, by the same path as the end of a backward; every rank must call it."""
    if any(_has_unsharded_gradient(parameter) for parameter in _fsdp_parameters(root)):
        _state(root)._root_post_backward_final_callback()


def drop_unsharded_gradients(root: nn.Module) -> None:
    """Forgets what is left over, as between two steps of which the first was abandoned."""
    for parameter in _fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _has_unsharded_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    unsharded = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    return unsharded is not None and unsharded.grad is not None


def _fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(_state(module)):
                yield from group.fsdp_params


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """What a module gathers and reduces with; None where it has no parameters of its own."""
    for group in fsdp_param_groups(_state(module)):  # type: ignore[arg-type]
        return group._all_gather_comm, group._reduce_scatter_comm
    return None


def held_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What FSDP2 holds on this rank, with the category that `explain.memory_table` gives it."""
    for parameter in _fsdp_parameters(root):
        yield PARAMETERS, parameter.sharded_param
        yield GRADIENTS, parameter.sharded_param.grad
        yield WHOLE_GRADIENTS, parameter.unsharded_accumulated_grad
        for gathered in parameter.all_gather_outputs:
            yield GATHERED, gathered
        if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
            yield WHOLE_GRADIENTS, unsharded.grad
