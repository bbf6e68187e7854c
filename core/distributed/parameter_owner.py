"""From a parameter to the wrapper that trains it: what optimizers, torch's too, ask before and tell after a step.

A parameter may be saved inside its model (``torch.save(wrapper.module)``): what wrappers keep on it stays out of the
file, so that what is loaded is a plain model.
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
    """What an optimizer asks of a wrapper, and says to it."""

    plan: ShardingPlan

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the gradients of its parameters."""

    def note_step(self) -> None:
        """An optimizer has written its parameters."""


_OWNER = "_data_parallel_owner"
_OF_WRAPPERS = frozenset(
    {
        *(_OWNER, "__getstate__", "main_grad", "main_grad_copy_in_grad_buffer", "has_buffer"),
        *("grad_added_to_main_grad", "lend_gradient_memory"),
    }
)
"""Attributes of parameters that belong to wrappers, and make no sense without them."""


class _Owner:
    """What a wrapper notes on each of its parameters."""

    def __init__(self, wrapper: TrainsParameters) -> None:
        self.wrapper = weakref.ref(wrapper)
        # Set when gradients are reduced, cleared when they are zeroed: `grad` is then the memory of `main_grad`.
        self.shares_gradient = False

    def __deepcopy__(self, memo: Any) -> None:
        return None


def own_parameters(params: Iterable[nn.Parameter], wrapper: TrainsParameters) -> None:
    """Makes `wrapper` the one that optimizers of these parameters ask; it is not kept alive."""
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
    """Notes whether ``param.grad`` was made the same memory as ``param.main_grad``."""
    getattr(param, _OWNER).shares_gradient = shares


def shares_gradient(param: nn.Parameter) -> bool:
    """Returns whether ``param.grad`` was made the same memory as ``param.main_grad`` since gradients were last
    zeroed."""
    owner: _Owner | None = getattr(param, _OWNER, None)
    return owner is not None and owner.shares_gradient


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """What a pickled parameter keeps of its attributes."""
    return {name: value for name, value in vars(param).items() if name not in _OF_WRAPPERS}


# ---- optimizers of torch, which know of no wrapper


@functools.cache
def _watch_torch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)  # torch calls both around the step of any optimizer
    register_optimizer_step_post_hook(_after_step)


def _wrappers_of(optimizer: Optimizer) -> list[TrainsParameters]:
    found = (owner_of(param) for group in optimizer.param_groups for param in group["params"])
    return list({id(wrapper): wrapper for wrapper in found if wrapper is not None}.values())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _has_closure(args, kwargs):
        return  # which computes the gradients: they are looked at afterwards
    for wrapper in _wrappers_of(optimizer):
        wrapper.check_may_step_directly(type(optimizer).__name__)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for wrapper in _wrappers_of(optimizer):
        if _has_closure(args, kwargs):
            wrapper.check_may_step_directly(type(optimizer).__name__)
        wrapper.note_step()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Of ``step(self, closure=None)``."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
