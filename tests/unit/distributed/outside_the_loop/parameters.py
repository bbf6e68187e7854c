"""Scenarios of parameters that have hooks, are exchanged after wrapping, or are held by references from before it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.unit.distributed._toys import Toy, toy
from tests.unit.distributed.outside_the_loop.scenario import (
    BUFFERED,
    KINDS,
    Run,
    batch,
    for_kinds,
    megatron,
    scenario,
    torchs,
)

REPLACED = "was replaced after the model was wrapped"


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def with_hooks() -> nn.Module:
    model = toy(tied=False)
    for parameter in (model.head.weight, model.blocks[0].up.weight):
        parameter.register_hook(_clamp)
    return model


@scenario(make=with_hooks)
def gradients_are_clamped_by_hooks_from_before_wrapping(run: Run) -> None:
    run.train(3)


@scenario()
def gradients_are_clamped_by_hooks_for_a_step(run: Run) -> None:
    run.train()
    clamped = (run.inner.head.weight, run.inner.blocks[0].up.weight)
    handles = [parameter.register_hook(_clamp) for parameter in clamped]
    run.train(1, first=1)
    for handle in handles:
        handle.remove()
    run.train(1, first=2)


@scenario(only=("fsdp2",))
def a_hook_is_set_while_its_parameter_is_gathered(run: Run) -> None:
    run.forward()
    handle = run.inner.head.weight.register_hook(_clamp)
    run.train()
    handle.remove()
    run.train(1, first=1)


def _halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def with_halving_hook() -> nn.Module:
    model = toy(tied=False)
    model.head.weight.register_post_accumulate_grad_hook(_halve)
    return model


@scenario(make=with_halving_hook, only=("fsdp2",))
def a_hook_from_before_wrapping_halves_a_reduced_gradient(run: Run) -> None:
    for step in range(2):
        run.compute(step)
        if run.is_plain:
            _halve(run.inner.head.weight)  # the gradient of both ranks, as FSDP2 shows it
        run.step()


@scenario(raises={"fsdp2": REPLACED})
def a_forward_is_called_with_other_weights(run: Run) -> None:
    run.train()
    weights = {("" if run.is_plain else "module.") + n: t for n, t in toy(seed=7, tied=False).state_dict().items()}
    with torch.no_grad():
        run.outputs["other"] = torch.func.functional_call(run.model, weights, batch(0, 0))
    run.train(1, first=1)


TIED = "weight was removed, or tied to another, after the model was wrapped"
CHANGED = "head.weight is in none of the wrapper's buffers|head.weight was replaced, added or made trainable"


@scenario(optimizer=None, raises=for_kinds(KINDS, CHANGED))
def the_head_is_replaced_after_wrapping(run: Run) -> None:
    run.inner.head = nn.Linear(7, 11, bias=False)
    run.optimizer = megatron(run)
    run.train()


@scenario(optimizer=None, only=("ddp", "fsdp2"), raises=for_kinds(KINDS, "was replaced, added or made trainable"))
def an_adapter_is_added_after_wrapping(run: Run) -> None:
    run.inner.head = nn.Sequential(nn.Linear(7, 7), run.inner.head)
    run.optimizer = torchs(run)
    run.train()


@scenario(optimizer=None, raises=for_kinds(KINDS, TIED))
def weights_are_tied_after_wrapping(run: Run) -> None:
    run.inner.head.weight = run.inner.embedding.weight
    run.optimizer = megatron(run)
    run.train()


@scenario(raises={**for_kinds(BUFFERED, TIED), "fsdp2": REPLACED})
def weights_are_tied_during_training(run: Run) -> None:
    run.train()
    run.inner.head.weight = run.inner.embedding.weight
    run.train(1, first=1)


class Bound(Toy):
    """A head that is bound in a partial."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.project = partial(nn.functional.linear, weight=self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.project(x)


def bound() -> nn.Module:
    torch.manual_seed(1)
    return Bound()


@scenario(make=bound, raises={"fsdp2": "head.weight was used by a reference from before the model was wrapped"})
def a_parameter_is_bound_elsewhere_before_wrapping(run: Run) -> None:
    run.train(2)
