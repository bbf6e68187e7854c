"""Rejects an optimizer whose parameters are not the model's: built before it was wrapped, or while FSDP2 had units
gathered, between a forward and the end of its step.

Such an optimizer changes nothing, because its parameters never get a gradient. Replaced parameters carry a mark, which
a torch hook checks before any optimizer's step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import OptimizerError

_MARK = "_replaced_as"
_GATHERED_MARK = "_gathered_of"


@contextmanager
def replaced_parameters_marked(module: nn.Module) -> Iterator[None]:
    """Marks the parameters that code inside replaces by others. Keeps none of them alive."""
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    yield
    after = {id(parameter) for parameter in module.parameters()}
    for name, reference in before.items():
        old = reference()
        if old is not None and id(old) not in after:
            setattr(old, _MARK, name)
    watch_optimizers()


def name_if_replaced(parameter: nn.Parameter) -> str | None:
    """Returns the name of a parameter that wrapping replaced in its model; None for other parameters."""
    return getattr(parameter, _MARK, None)


def mark_as_gathered(parameter: nn.Parameter, name: str) -> None:
    """Marks the tensor that FSDP2 gathers a parameter into, which the module shows until it is resharded."""
    setattr(parameter, _GATHERED_MARK, name)


def is_marked(parameter: nn.Parameter) -> bool:
    """Returns whether `mark_as_gathered` was called for the parameter."""
    return hasattr(parameter, _GATHERED_MARK)


def reject_gathered(optimizer: str, parameter: nn.Parameter) -> None:
    """Raises if an optimizer holds the tensor that a parameter was gathered into.

    Raises:
        OptimizerError: names the parameter.
    """
    name = getattr(parameter, _GATHERED_MARK, None)
    if name is not None:
        raise OptimizerError(
            f"{optimizer} was built while parameter {name} was gathered, after a forward and before the end of its "
            "step: it holds the gathered copy, so that its steps would change nothing; build it before the first "
            "forward, or after zero_grad_buffer()"
        )


def stale_optimizer_message(optimizer: str, name: str) -> str:
    """Returns the message for an optimizer that holds a replaced parameter."""
    return (
        f"{optimizer} was built before the model was wrapped: it holds the old parameter {name}, which wrapping "
        "replaced, so that its steps would change nothing; build the optimizer afterwards, from the wrapped model's "
        "parameters, as get_megatron_optimizer(config, [wrapped_model]) does"
    )


@functools.cache
def watch_optimizers() -> None:
    """Registers a hook, once per process, that sees every optimizer before it steps."""
    register_optimizer_step_pre_hook(_check)  # torch calls it before the step of any optimizer


def known_optimizers() -> list[Optimizer]:
    """Returns the living optimizers that have begun a step since `watch_optimizers`."""
    return list(_stepped)


_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _stepped.add(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reject_gathered(type(optimizer).__name__, parameter)
            name = name_if_replaced(parameter)
            if name is not None:
                raise OptimizerError(stale_optimizer_message(type(optimizer).__name__, name))
