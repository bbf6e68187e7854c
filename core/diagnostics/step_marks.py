"""Marks on parameters that speak up when an optimizer, torch's too, steps them; and the hooks that read the marks.

Torch calls these hooks for every optimizer of the process. There is no other place to notice one that knows of no
wrapper: over sharded parameters, built before its model was wrapped, or writing parameters while they are gathered. So
one hook before a step and one after it, both here, serve all of these purposes. An optimizer whose parameters have no
mark costs one look at each of them; one of `core.optimizer` costs nothing, because it asks its wrappers itself
(`note_own_optimizer`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

MARK = "_step_mark"
"""The attribute of a parameter that holds its mark."""

_IS_OWN = "_asks_wrappers_itself"
"""An attribute of an optimizer, set by `note_own_optimizer` for good."""

_MET = "_marks_of_step"
"""An attribute of an optimizer: the marks that the hook before a step met, for the one after it, which takes it away.
A step that raised leaves it to the next one, which sets it anew."""


class StepMark:
    """What a parameter has to say to optimizers. One mark may be on many parameters, and is asked once a step."""

    def refuse(self, optimizer: str) -> None:
        """Raises where no step of the parameter could be right.

        Args:
            optimizer: the name of its class, for the message.
        """

    def check_gradients(self, optimizer: str) -> None:
        """Raises unless ``param.grad`` is what an optimizer has to read; after the step, where that has a closure."""

    def note_step(self) -> None:
        """Called when an optimizer has written the parameter."""

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a parameter has no mark."""


def set_mark(param: nn.Parameter, mark: StepMark) -> None:
    """Puts a mark on a parameter, in place of the one that it has; optimizers meet it from now on."""
    setattr(param, MARK, mark)
    _watch_optimizers()


def mark_of(param: Any) -> StepMark | None:
    """The mark that was last put on a parameter."""
    mark: StepMark | None = getattr(param, MARK, None)
    return mark


def note_own_optimizer(optimizer: Optimizer) -> None:
    """Lets the hooks pass over an optimizer for which somebody else asks the wrappers."""
    setattr(optimizer, _IS_OWN, True)
    _known.add(optimizer)


def known_optimizers() -> list[Optimizer]:
    """The optimizers of `core.optimizer`, and those that have stepped marked parameters, as far as they exist."""
    return list(_known)


_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Added to by `note_own_optimizer` and by the hook before a step; an optimizer leaves it when it is freed."""


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, _IS_OWN):
        return
    found = dict.fromkeys(getattr(param, MARK, None) for group in optimizer.param_groups for param in group["params"])
    marks = [mark for mark in found if mark is not None]
    setattr(optimizer, _MET, marks)
    if not marks:
        return
    _known.add(optimizer)
    name = type(optimizer).__name__
    for mark in marks:
        mark.refuse(name)
    if not _has_closure(args, kwargs):  # a closure computes the gradients: they are looked at afterwards
        for mark in marks:
            mark.check_gradients(name)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for mark in vars(optimizer).pop(_MET, ()):
        if _has_closure(args, kwargs):
            mark.check_gradients(type(optimizer).__name__)
        mark.note_step()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Of ``step(self, closure=None)``."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
