"""From a parameter to the wrapper that trains it: what optimizers, torch's too, ask before and tell after a step.

A parameter may be saved inside its model (``torch.save(wrapper.module)``): what wrappers keep on it stays out of the
file, so that what is loaded is a plain model.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from ..diagnostics.step_marks import MARK, StepMark, mark_of, set_mark
from .plan import ShardingPlan


class TrainsParameters(Protocol):
    """A wrapper, as an optimizer sees it."""

    @property
    def plan(self) -> ShardingPlan:
        """Its plan, with the parameters in it."""

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the gradients of its parameters."""

    def note_step(self) -> None:
        """An optimizer has written its parameters."""


_SHARES_GRADIENT = "_shares_gradient"
"""Set when gradients are reduced, cleared when they are zeroed: `grad` is then the memory of `main_grad`."""

_OF_WRAPPERS = frozenset(
    {
        *(MARK, _SHARES_GRADIENT, "__getstate__", "main_grad", "main_grad_copy_in_grad_buffer", "has_buffer"),
        *("grad_added_to_main_grad", "lend_gradient_memory", "held_range", "seen_while_pending"),
    }
)
"""Attributes of parameters that belong to wrappers, and make no sense without them."""


class _Owner(StepMark):
    """On every parameter of a wrapper, while that exists."""

    def __init__(self, wrapper: TrainsParameters) -> None:
        self.wrapper = weakref.ref(wrapper)

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_may_step_directly(optimizer)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.note_step()


def own_parameters(params: Iterable[nn.Parameter], wrapper: TrainsParameters) -> None:
    """Makes `wrapper` the one that optimizers of these parameters ask; it is not kept alive."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        share_gradient(param, False)
        # Asked for by pickle. No weak reference: torch could not swap the parameter's tensor then, as `to` does.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]


def owner_of(param: Any) -> TrainsParameters | None:
    """The wrapper that trains the parameter, while it exists."""
    mark = mark_of(param)
    return mark.wrapper() if isinstance(mark, _Owner) else None


def share_gradient(param: nn.Parameter, shares: bool) -> None:
    """Notes whether ``param.grad`` was made the same memory as ``param.main_grad``."""
    setattr(param, _SHARES_GRADIENT, shares)


def shares_gradient(param: nn.Parameter) -> bool:
    """Whether ``param.grad`` was made the same memory as ``param.main_grad`` since gradients were last zeroed."""
    return getattr(param, _SHARES_GRADIENT, False) and isinstance(mark_of(param), _Owner)


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes that a pickled parameter keeps."""
    return {name: value for name, value in vars(param).items() if name not in _OF_WRAPPERS}
