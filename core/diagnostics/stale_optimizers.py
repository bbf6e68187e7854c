"""Rejects an optimizer, or other code, whose parameters are not the model's.

It was built before the model was wrapped, or while FSDP2 had units gathered, between a forward and the end of its
step. Its parameters never get a gradient, so it would change nothing. The parameters are marked; its step raises, and
so does any other use of a parameter that wrapping has replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn

from ..errors import OptimizerError, UnitError
from ..pending_parameters import can_be_pending, make_pending
from .step_marks import StepMark, mark_of, set_mark


class _Replaced(StepMark):
    """The mark of a parameter that wrapping replaced by another, called `name` in the model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse_use(self) -> NoReturn:
        raise UnitError(
            f"parameter {self.name} was used by a reference from before the model was wrapped, which replaced it by "
            "another; take references from the wrapped model, or use DistributedDataParallel"
        )

    def refuse(self, optimizer: str) -> None:
        raise OptimizerError(
            f"{optimizer} was built before the model was wrapped: it holds the old parameter {self.name}, which "
            "wrapping replaced, so that its steps would change nothing; build the optimizer afterwards, from the "
            "wrapped model's parameters, as get_megatron_optimizer(config, [wrapped_model]) does"
        )


class _GatheredCopy(StepMark):
    """The mark of the tensor that FSDP2 gathers the parameter `name` into; the module holds it until it reshards."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, optimizer: str) -> None:
        raise OptimizerError(
            f"{optimizer} was built while parameter {self.name} was gathered, after a forward and before the end of "
            "its step: it holds the gathered copy, so that its steps would change nothing; build it before the first "
            "forward, or after zero_grad_buffer()"
        )


@contextmanager
def replaced_parameters_marked(module: nn.Module) -> Iterator[None]:
    """Marks the parameters that the code inside replaces; keeps only weak references to them."""
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    yield
    after = {id(parameter) for parameter in module.parameters()}
    for name, reference in before.items():
        old = reference()
        if old is not None and id(old) not in after:
            mark = _Replaced(name)
            set_mark(old, mark)
            if can_be_pending(old):
                make_pending([old], mark.refuse_use)


def reject_replaced(optimizer: str, parameter: nn.Parameter) -> None:
    """Raises if wrapping replaced the parameter in its model.

    Raises:
        OptimizerError: names the parameter.
    """
    mark = mark_of(parameter)
    if isinstance(mark, _Replaced):
        mark.refuse(optimizer)


def mark_as_gathered(parameter: nn.Parameter, name: str) -> None:
    """Marks the tensor that FSDP2 gathers a parameter into."""
    set_mark(parameter, _GatheredCopy(name))
