"""The wrapper of a parameter: optimizers, torch's too, find it there, check with it before a step and notify it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..plan import Plan
from ..step_marks import MARK, StepMark, mark_of, set_mark
from .engine import Engine

WRAPPER_ATTRIBUTES = frozenset(
    {
        MARK,  # the `_Owner`: `own_parameters` sets it; never cleared
        "__getstate__",  # `own_parameters` sets it; never cleared
        "main_grad",  # `GradSlot` sets it to memory of a bucket, and to None while there is no gradient
        "main_grad_copy_in_grad_buffer",  # `GradSlot` sets it where `main_grad` is fp32 memory of its own
        "has_buffer",  # True from the construction of a wrapper with buffers on
        "grad_added_to_main_grad",  # a layer's backward sets True; the wrapper's hook, and `zero_grad_buffer`, False
        "lend_gradient_memory",  # `Bucket.lend` of its bucket; never cleared
        "held_range",  # `keep_range` sets it when shards are made, and around `whole_parameters`
        "pending_view",  # `set_pending_view` sets it; never cleared
    }
)
"""Attributes that wrappers set on parameters. They are not pickled, so that ``torch.save(wrapper.module)`` saves a
plain model, and no wrapper deletes them."""


class WrappedModel(nn.Module):
    """A module whose parameters an engine holds: the base of all wrappers."""

    plan: Plan
    engine: Engine

    def check_step(self, optimizer: str, *, is_torchs: bool = False) -> None:
        """Raises unless an optimizer may step the model: see `_BaseDataParallel`."""


class _Owner(StepMark):
    """The mark of every parameter of a wrapper, while the wrapper exists."""

    shows_gradients = True

    def __init__(self, wrapper: WrappedModel) -> None:
        self.wrapper = weakref.ref(wrapper)  # a parameter may outlive its wrapper

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_step(optimizer, is_torchs=True)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.engine.updated()


def own_parameters(params: Iterable[nn.Parameter], wrapper: WrappedModel) -> None:
    """Registers the wrapper of these parameters. They hold only a weak reference to it."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        # Pickle calls it. It is bound to the parameter without a weak reference, because torch cannot swap the tensor
        # of a parameter (`Module.to`) that has weak references.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]


def owner_of(param: Any) -> WrappedModel | None:
    """Returns the wrapper that trains the parameter, while it exists."""
    mark = mark_of(param)
    return mark.wrapper() if isinstance(mark, _Owner) else None


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter to pickle."""
    return {name: value for name, value in vars(param).items() if name not in WRAPPER_ATTRIBUTES}
