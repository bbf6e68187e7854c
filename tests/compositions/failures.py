"""Errors of a program, raised in a forward or backward and caught, and gradients that overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tests.compositions.training import Training
from tests.unit.distributed.outside_the_loop.scenario import failing


def fail_in_backward(training: Training, step: int, index: int) -> None:
    """Begins a micro-batch whose backward raises in the last module that it reaches."""
    decoder: Any = training.module.decoder
    last = decoder.final_layernorm if training.composition.trained == "one norm" else decoder.layers[0]
    with failing(last.register_full_backward_pre_hook):
        training.backward(step, index)


@contextmanager
def overflowing(model: nn.Module) -> Iterator[None]:
    handle = model.register_forward_hook(_overflow)
    try:
        yield
    finally:
        handle.remove()


def _overflow(model: nn.Module, args: object, losses: Tensor) -> None:
    if losses.requires_grad:
        losses.register_hook(lambda gradient: gradient * float("inf"))
