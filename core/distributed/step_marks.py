"""Marks on parameters, and the hooks that call them when any optimizer, also one of torch, steps the parameters.

Torch calls the hooks for every optimizer of the process. Only they can find an optimizer that does not know wrappers:
over sharded parameters, built before its model was wrapped, or writing parameters while they are gathered. One hook
before a step and one after it, both here, serve all of these purposes. An optimizer whose parameters have no mark
costs one look-up per parameter; one of `shardstack.optimizer` costs nothing, because it calls its wrappers itself
(`note_own_optimizer`).

An optimizer that was built before its model was wrapped, or while FSDP2 had units gathered, has parameters that never
get a gradient, so that it would change nothing. They are marked: its step raises, and so does any other use of a
parameter that wrapping has replaced.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.errors import OptimizerError, UnitError
from ..base.memory_categories import note_optimizer
from ..base.parameters import can_be_pending, make_pending

MARK = "_step_mark"
"""The attribute of a parameter that holds its mark."""

_IS_OWN = "_asks_wrappers_itself"
"""An attribute of an optimizer. `note_own_optimizer` sets it."""

_MET = "_marks_of_step"
"""An attribute of an optimizer: the marks that the hook before a step found, for the hook after it, which removes it.
After a step that raised it stays until the next step sets it."""


class StepMark:
    """Called for a parameter when an optimizer steps it. One mark may be on many parameters, and is called once a
    step."""

    shows_gradients = False
    """Whether ``param.grad`` counts in place of ``main_grad``: a wrapper shows reduced gradients there."""

    def refuse(self, optimizer: str) -> None:
        """Raises if no step of the parameter can be correct.

        Args:
            optimizer: the name of its class, for the message.
        """

    def check_gradients(self, optimizer: str) -> None:
        """Raises unless an optimizer may read ``param.grad``. Called after the step if that has a closure."""

    def note_step(self) -> None:
        """Acts on a step. Called when an optimizer has written the parameter."""

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copy of a parameter has no mark."""


def set_mark(param: nn.Parameter, mark: StepMark) -> None:
    """Sets the mark of a parameter, replacing an earlier one."""
    setattr(param, MARK, mark)
    _watch_optimizers()


def mark_of(param: Any) -> StepMark | None:
    """Returns the mark of a parameter, or None if it has none."""
    mark: StepMark | None = getattr(param, MARK, None)
    return mark


def note_own_optimizer(rule: Optimizer, optimizer: Optimizer) -> None:
    """Makes the hooks skip an optimizer that calls its wrappers itself, and the update rule inside it."""
    for own in (rule, optimizer):
        setattr(own, _IS_OWN, True)
    note_optimizer(rule)


def is_own_optimizer(optimizer: Optimizer) -> bool:
    """Returns whether `note_own_optimizer` was called for an optimizer."""
    return hasattr(optimizer, _IS_OWN)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if is_own_optimizer(optimizer):
        return
    # By their order and each once: thousands of parameters share one mark, whose checks take long.
    every = dict.fromkeys(getattr(param, MARK, None) for group in optimizer.param_groups for param in group["params"])
    marks = [mark for mark in every if mark is not None]
    setattr(optimizer, _MET, marks)
    if not marks:
        return
    note_optimizer(optimizer)
    name = type(optimizer).__name__
    for mark in marks:
        mark.refuse(name)
    if not _has_closure(args, kwargs):  # a closure computes the gradients: check them after the step
        for mark in marks:
            mark.check_gradients(name)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for mark in vars(optimizer).pop(_MET, ()):
        if _has_closure(args, kwargs):
            mark.check_gradients(type(optimizer).__name__)
        mark.note_step()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether ``step(self, closure=None)`` was called with a closure."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


class _Untrained(StepMark):
    """The mark of a tensor in the place of parameter `name`, which an optimizer would step without effect.

    Wrapping has replaced it by another, or else FSDP2 gathers the parameter into it, and the module holds it until it
    reshards.
    """

    def __init__(self, name: str, module: nn.Module | None) -> None:
        self.name = name
        # The module that has the replacement; None where FSDP2 gathers. A reference to a tensor would bar swaps of it.
        self.module = module if module is None else weakref.ref(module)

    def refuse_use(self) -> NoReturn:
        raise UnitError(
            f"parameter {self.name} was used by a reference from before the model was wrapped, which replaced it by "
            "another; take references from the wrapped model, or use DistributedDataParallel"
        )

    def refuse(self, optimizer: str) -> NoReturn:
        if self.module is not None:
            raise OptimizerError(
                f"{optimizer} was built before the model was wrapped: it holds the old parameter {self.name}, which "
                "wrapping replaced, so that its steps would change nothing; give it to "
                "shardstack.optimizer.shard_optimizer(optimizer, model), or build it from the wrapped model's "
                "parameters"
            )
        raise OptimizerError(
            f"{optimizer} was built while parameter {self.name} was gathered, after a forward and before the end of "
            "its step: it holds the gathered copy, so that its steps would change nothing; build it before the first "
            "forward, or after zero_grad_buffer()"
        )


@contextmanager
def replaced_parameters_marked(module: nn.Module) -> Iterator[None]:
    """Marks the parameters that the code inside replaces. Keeps only weak references to them."""
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    yield
    after = {id(parameter) for parameter in module.parameters()}
    for name, reference in before.items():
        old = reference()
        if old is not None and id(old) not in after:
            mark = _Untrained(name, module)
            set_mark(old, mark)
            if can_be_pending(old):
                make_pending([old], mark.refuse_use)


def reject_replaced(optimizer: str, parameter: nn.Parameter) -> None:
    """Raises if wrapping replaced the parameter in its model, or it is what a parameter is gathered into.

    Raises:
        OptimizerError: names the parameter.
    """
    mark = mark_of(parameter)
    if isinstance(mark, _Untrained):
        mark.refuse(optimizer)


def current_parameter(optimizer: str, parameter: nn.Parameter) -> nn.Parameter:
    """Returns the parameter of the wrapped model that has replaced one of the plain model, or else the same one.

    Raises:
        OptimizerError: it is what a parameter is gathered into.
    """
    mark = mark_of(parameter)
    if not isinstance(mark, _Untrained):
        return parameter
    module = mark.module() if mark.module is not None else None
    if module is None:
        mark.refuse(optimizer)
    return module.get_parameter(mark.name)


def mark_as_gathered(parameter: nn.Parameter, name: str) -> None:
    """Marks the tensor that FSDP2 gathers a parameter into."""
    set_mark(parameter, _Untrained(name, None))
