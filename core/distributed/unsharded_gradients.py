"""Gradients that a sharded model holds whole, because `no_sync` kept them on this rank.

FSDP2 reduces a unit's gradient from the backward hook that produced it. After a last micro-batch inside `no_sync`, or
one that did not reach every unit, whole gradients are left over; torch has no public way to reduce or to drop them.
This file alone reads FSDP2's private state, and its tests pin what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .._torch_compat import fsdp_param_groups


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
