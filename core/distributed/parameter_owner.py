"""Finds the wrapper of a parameter, and the gradient that an optimizer reads.

Optimizers, torch's included, check with the wrapper before a step and notify it afterwards. Attributes that wrappers
set on parameters are not pickled, so that ``torch.save(wrapper.module)`` saves a plain model.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..diagnostics.step_marks import MARK, StepMark, mark_of, set_mark
from ..dtensors import local_part
from .plan import ShardingPlan
from .unreadable_gradient import is_unreadable


class TrainsParameters(Protocol):
    """The part of a wrapper that optimizers use."""

    @property
    def plan(self) -> ShardingPlan:
        """The wrapper's plan, which lists the parameters."""

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the parameters' gradients."""

    def note_step(self) -> None:
        """Records that an optimizer has written the parameters."""


_SHARES_GRADIENT = "_shares_gradient"
"""An attribute of a parameter: whether ``grad`` shows ``main_grad``. `set_gradient_shared` sets it: to True when whole
reduced gradients are shown, to False when they are zeroed."""

_OF_WRAPPERS = frozenset(
    {
        MARK,  # the `_Owner`: `own_parameters` sets it; never cleared
        _SHARES_GRADIENT,
        "__getstate__",  # `own_parameters` sets it; never cleared
        "main_grad",  # `GradSlot` sets it to memory of a bucket, and to None while there is no gradient
        "main_grad_copy_in_grad_buffer",  # `GradSlot` sets it where `main_grad` is fp32 memory of its own
        "has_buffer",  # True from the construction of a wrapper with buffers on
        "grad_added_to_main_grad",  # a layer's backward sets True; the wrapper's hook, and `zero_grad_buffer`, False
        "lend_gradient_memory",  # the `GradientLender`; never cleared
        "held_range",  # `keep_range` sets it when shards are made, and around `whole_parameters`
        "pending_view",  # `set_pending_view` sets it; never cleared
    }
)
"""Attributes that wrappers set on parameters; they are not pickled, and no wrapper deletes them."""


class _Owner(StepMark):
    """The mark of every parameter of a wrapper, while the wrapper exists."""

    def __init__(self, wrapper: TrainsParameters) -> None:
        self.wrapper = weakref.ref(wrapper)  # a parameter may outlive its wrapper

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_may_step_directly(optimizer)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.note_step()


def own_parameters(params: Iterable[nn.Parameter], wrapper: TrainsParameters) -> None:
    """Registers `wrapper` as the wrapper of these parameters; parameters hold only a weak reference to it."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        set_gradient_shared(param, False)
        # Pickle calls it. It is bound to the parameter without a weak reference, because torch cannot swap the tensor
        # of a parameter (`Module.to`) that has weak references.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]


def owner_of(param: Any) -> TrainsParameters | None:
    """Returns the wrapper that trains the parameter, while it exists."""
    mark = mark_of(param)
    return mark.wrapper() if isinstance(mark, _Owner) else None


def set_gradient_shared(param: nn.Parameter, shares: bool) -> None:
    """Records whether ``param.grad`` shows ``param.main_grad``, which is whole."""
    setattr(param, _SHARES_GRADIENT, shares)


def shares_gradient(param: nn.Parameter) -> bool:
    """Returns whether ``param.grad`` has shown ``main_grad`` since gradients were last reduced."""
    return getattr(param, _SHARES_GRADIENT, False) and isinstance(mark_of(param), _Owner)


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `read_gradient`."""
    gradient = read_gradient(parameter)
    return None if gradient is None else local_part(gradient)


def read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient that the optimizer reads: ``main_grad`` where present, else ``grad``; None leaves it out.

    After `finish_grad_sync` ``grad`` is the same memory where gradients are whole, or in another dtype a tensor that
    cannot be read; a ``grad`` that the user has set since, to another tensor or to None, counts.
    """
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if gradient is not None and is_unreadable(parameter.grad):
        return gradient
    is_written = owner_of(parameter) is not None and parameter.grad is not None
    return parameter.grad if gradient is None or is_written or shares_gradient(parameter) else gradient


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter to pickle."""
    return {name: value for name, value in vars(param).items() if name not in _OF_WRAPPERS}
