"""Calls in a wrong order and other misuse, which has to raise, and to leave no trace once gradients are zeroed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.base.errors import ShardstackError
from tests.compositions.failures import fail_in_backward
from tests.compositions.wrapped import Wrapped


@dataclass(frozen=True)
class _Mistake:
    make: Callable[[Wrapped, int], None]
    """Trains a part of a step, wrongly."""
    pattern: str
    """Of the error's message."""


def make_mistake(training: Wrapped, step: int) -> None:
    """Makes the part's mistake, checks that it is refused, and zeroes gradients.

    Raises:
        AssertionError: nothing was refused, or something else.
    """
    name = training.part.mistake
    if name == "none":
        return
    mistake = _MISTAKES[name]
    training.begin_step()
    try:
        mistake.make(training, step)
    except ShardstackError as error:
        message = str(error)
    else:
        raise AssertionError(f"no error where a training {name}")
    assert re.search(mistake.pattern, message), f"{name}: refused in other words than {mistake.pattern!r}: {message}"
    training.zero()


def _last(training: Wrapped) -> int:
    """Returns the index of the micro-batch whose backward reduces."""
    return training.number - 1


def _step_before_finalizing(training: Wrapped, step: int) -> None:
    training.backward(step, _last(training))
    training.optimizer.step()


def _finalize_twice(training: Wrapped, step: int) -> None:
    training.backward(step, _last(training))
    training.finish_gradients()
    training.finish_gradients()


def _finalize_after_failed_backward(training: Wrapped, step: int) -> None:
    fail_in_backward(training, step, _last(training))
    training.finish_gradients()


def _write_what_is_gathered(training: Wrapped, step: int) -> None:
    _in_first_mlp(training, step, _double_weights)
    training.zero()


def _run_two_units_at_once(training: Wrapped, step: int) -> None:
    decoder: Any = training.module.decoder
    _in_first_mlp(training, step, lambda mlp, args: decoder.layers[1](*args))


def _in_first_mlp(training: Wrapped, step: int, act: Callable[[nn.Module, Any], object]) -> None:
    """Runs a forward that calls `act` inside the first layer's."""
    decoder: Any = training.module.decoder

    def once(mlp: nn.Module, args: Any) -> None:
        handle.remove()
        act(mlp, args)

    handle = decoder.layers[0].mlp.register_forward_pre_hook(once)
    training.loss(step, 0)


@torch.no_grad()
def _double_weights(mlp: nn.Module, args: Any) -> None:
    next(p for p in mlp.parameters() if p.dtype.is_floating_point).mul_(2.0)


_MISTAKES = {
    "steps before finalizing": _Mistake(
        _step_before_finalizing, r"was called before the gradients of the step were reduced"
    ),
    "finalizes twice": _Mistake(_finalize_twice, "finalize_model_grads was called twice for one step"),
    "finalizes after a failed backward": _Mistake(
        _finalize_after_failed_backward, "a backward of this step raised an error"
    ),
    "writes what is gathered": _Mistake(_write_what_is_gathered, "was written while its unit was gathered"),
    "runs two units at once": _Mistake(_run_two_units_at_once, "both are gathered into one memory"),
}
