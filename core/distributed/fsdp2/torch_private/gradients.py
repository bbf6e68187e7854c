"""Reduces, completes or drops gradients that `no_sync` has left whole on this rank.

FSDP2 reduces a unit's gradient from the backward hook that produced it. After a last micro-batch inside `no_sync`, or
one that did not reach every unit, whole gradients are left over; torch has no public way to reduce or to drop them.

Relies on torch keeping them in ``_unsharded_param.grad`` of a parameter, there from its first gather on, and where
they are reduced in another dtype in ``unsharded_accumulated_grad``: kept elsewhere, `zero_grad_buffer` would leave
them, and the next step would add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .states import fsdp_parameters, param_groups, state_of


def reduce_unsharded_gradients(root: nn.Module) -> None:
    """Reduces whole gradients, by the same path as the end of a backward; every rank must call it."""
    if any(_has_unsharded_gradient(parameter) for parameter in fsdp_parameters(root)):
        state_of(root)._root_post_backward_final_callback()


def drop_unsharded_gradients(root: nn.Module) -> None:
    """Drops whole gradients, as after a step that was abandoned."""
    for parameter in fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def complete_accumulated_gradients(root: nn.Module) -> None:
    """Adds zero gradients for parameters that `no_sync` left without one, if others of their group have one.

    Accumulated gradients have the dtype of the reduction. A gradient that only the last backward computes has that of
    the computation, and FSDP2 reduces one dtype at a time.
    """
    for group in param_groups(root):
        trained = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad]
        accumulated = (p.unsharded_accumulated_grad for p in trained)
        if (found := next((gradient for gradient in accumulated if gradient is not None), None)) is None:
            continue
        for parameter in trained:
            if parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter._unsharded_param, dtype=found.dtype)


def allow_ungathered_units(root: nn.Module) -> None:
    """Lets `no_sync` end a backward where no forward has reached some unit: torch asks for its gradient nevertheless.

    (pytorch/pytorch#194058)
    """
    for parameter in fsdp_parameters(root):
        parameter.to_accumulated_grad_if_needed = partial(
            _if_gathered_before, parameter, parameter.to_accumulated_grad_if_needed
        )


def _if_gathered_before(parameter: Any, method: Callable[[], None]) -> None:
    if hasattr(parameter, "_unsharded_param"):
        method()


def whole_gradients(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yields gradients that this rank holds whole, until they are reduced."""
    for parameter in fsdp_parameters(root):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for gradient in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if gradient is not None:
                yield gradient


def _has_unsharded_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    unsharded = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    return unsharded is not None and unsharded.grad is not None
