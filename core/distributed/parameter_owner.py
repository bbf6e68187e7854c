"""Finds the wrapper of a parameter, so that optimizers, torch's too, check it before a step and notify it after.

A parameter may be saved inside its model (``torch.save(wrapper.module)``): attributes of wrappers are left out of the
file, so that loading it gives a plain model.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .plan import ShardingPlan


class TrainsParameters(Protocol):
    """The part of a wrapper that optimizers use."""

    plan: ShardingPlan

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the gradients of its parameters."""

    def note_step(self) -> None:
        """Records that an optimizer has written its parameters."""


_OWNER = "_data_parallel_owner"
_OF_WRAPPERS = frozenset(
    {
        *(_OWNER, "__getstate__", "main_grad", "main_grad_copy_in_grad_buffer", "has_buffer"),
        *("grad_added_to_main_grad", "lend_gradient_memory"),
    }
)
"""Attributes of parameters that wrappers set, and that are left out of pickles."""


class _Owner:
    """The attribute that a wrapper sets on each of its parameters."""

    def __init__(self, wrapper: TrainsParameters) -> None:
        self.wrapper = weakref.ref(wrapper)
        # Whether `grad` is the memory of `main_grad`: set when gradients are reduced, cleared when they are zeroed.
        self.shares_gradient = False

    def __deepcopy__(self, memo: Any) -> None:
        return None


def own_parameters(params: Iterable[nn.Parameter], wrapper: TrainsParameters) -> None:
    """Makes `wrapper` the one that optimizers of these parameters check; holds only a weak reference to it."""
    for param in params:
        setattr(param, _OWNER, _Owner(wrapper))
        # Asked for by pickle. No weak reference: torch could not swap the parameter's tensor then, as `to` does.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]
    _watch_torch_optimizers()


def owner_of(param: Any) -> TrainsParameters | None:
    """Returns the wrapper that trains the parameter, while it exists."""
    owner: _Owner | None = getattr(param, _OWNER, None)
    return None if owner is None else owner.wrapper()


def share_gradient(param: nn.Parameter, shares: bool) -> None:
    """Records whether ``param.grad`` is the same memory as ``param.main_grad``."""
    getattr(param, _OWNER).shares_gradient = shares


def shares_gradient(param: nn.Parameter) -> bool:
    """Returns whether ``param.grad`` is the same memory as ``param.main_grad`` since the last reduction."""
    owner: _Owner | None = getattr(param, _OWNER, None)
    return owner is not None and owner.shares_gradient


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter to pickle."""
    return {name: value for name, value in vars(param).items() if name not in _OF_WRAPPERS}


# ---- torch's optimizers, which do not know wrappers


@functools.cache
def _watch_torch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)  # torch calls both around the step of any optimizer
    register_optimizer_step_post_hook(_after_step)


def _wrappers_of(optimizer: Optimizer) -> list[TrainsParameters]:
    found = (owner_of(param) for group in optimizer.param_groups for param in group["params"])
    return list({id(wrapper): wrapper for wrapper in found if wrapper is not None}.values())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _has_closure(args, kwargs):
        return  # the closure computes the gradients: check them after the step
    for wrapper in _wrappers_of(optimizer):
        wrapper.check_may_step_directly(type(optimizer).__name__)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for wrapper in _wrappers_of(optimizer):
        if _has_closure(args, kwargs):
            wrapper.check_may_step_directly(type(optimizer).__name__)
        wrapper.note_step()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether ``step(self, closure=None)`` was called with a closure."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
