"""Scenarios of optimizers: torch's and ours, frozen parameters, steps out of order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.distributed._toys import Toy
from tests.unit.distributed.outside_the_loop.scenario import (
    BUFFERED,
    KINDS,
    SHARDED,
    Run,
    batch,
    for_kinds,
    megatron,
    scenario,
    torchs,
)


@scenario(optimizer=torchs, raises=for_kinds(SHARDED, "SGD was to step parameters whose gradients"))
def an_optimizer_of_torch(run: Run) -> None:
    run.train(3)


@scenario(optimizer=torchs, raises=for_kinds(SHARDED, "SGD was to step|set_to_none|a gradient was read"))
def an_optimizer_of_torch_zeroes_the_gradients(run: Run) -> None:
    for set_to_none in (True, False, True):
        run.optimizer.zero_grad(set_to_none=set_to_none)
        run.forget()
        run.train(zeroes=False)


@scenario()
def parameters_are_frozen_and_thawed_during_training(run: Run) -> None:
    run.train()
    run.inner.blocks[0].requires_grad_(False)
    run.train(2, first=1)
    run.inner.blocks[0].requires_grad_(True)
    run.train(1, first=3)


@scenario(
    settings={
        kind: {"bucket_size": 20}
        for kind in ("ddp_overlap", "zero2_overlap")  # buckets without a trained parameter
    }
)
def a_layer_is_thawed_between_zeroing_and_backward(run: Run) -> None:
    for step in range(3):
        run.inner.blocks.requires_grad_(False)  # the discriminator, in the generator's step
        run.train(micro_batches=1, first=step)
        run.zero()
        run.inner.blocks.requires_grad_(True)
        run.train(first=step + 1, zeroes=False)


def decaying(run: Run) -> Any:
    return megatron(run, weight_decay=0.5)


@scenario(optimizer=decaying)
def a_layer_is_thawed_between_finalizing_and_the_step(run: Run) -> None:
    run.train()
    for step in range(1, 3):
        run.inner.blocks.requires_grad_(False)
        run.compute(step)
        run.inner.blocks.requires_grad_(True)
        run.step()


@scenario(optimizer=decaying)
def a_layer_is_thawed_between_backward_and_finalizing(run: Run) -> None:
    run.train()
    run.inner.blocks.requires_grad_(False)
    run.zero()
    run.backward(1)
    run.inner.blocks.requires_grad_(True)
    run.finish_and_step()  # it has zeros now, as what is not used


class Chosen(Toy):
    """Uses a parameter only for some micro-batches, so that in some steps one rank does, or none."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.spare = nn.Parameter(torch.full((2, 7), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = self.spare.sum() if tokens[0, 0] % 3 == 0 else 0.0
        return super().forward(tokens) * (1 + chosen)


def chosen() -> nn.Module:
    torch.manual_seed(1)
    return Chosen()


@scenario(make=chosen, optimizer=decaying)
def a_parameter_is_used_in_some_steps_on_some_ranks(run: Run) -> None:
    assert {sum(int(batch(rank, step)[0, 0]) % 3 == 0 for rank in range(2)) for step in range(6)} >= {0, 1}
    for step in range(6):
        run.train(1, micro_batches=1, first=step)


@scenario(optimizer=decaying)
def a_layer_is_frozen_between_finalizing_and_the_step(run: Run) -> None:
    for step in range(2):
        run.compute(step)
        run.inner.blocks.requires_grad_(False)
        run.step()
        run.inner.blocks.requires_grad_(True)


@scenario(optimizer=None, raises=for_kinds(KINDS, "head.weight was made trainable after the optimizer was built"))
def a_layer_is_thawed_that_the_optimizer_does_not_have(run: Run) -> None:
    run.inner.head.requires_grad_(False)
    run.optimizer = megatron(run)
    run.train()
    run.inner.head.requires_grad_(True)
    run.train(1, first=1)


@scenario(
    raises=for_kinds(BUFFERED, "frozen was replaced, added or made trainable after the model was wrapped")
    | for_kinds(("fsdp2",), "frozen was made trainable after the optimizer was built")
)
def a_parameter_is_thawed_that_was_frozen_when_wrapped(run: Run) -> None:
    run.inner.frozen.requires_grad_(True)
    run.train()


@scenario(optimizer=None)
def two_optimizers_have_a_part_of_the_model_each(run: Run) -> None:
    run.inner.blocks.requires_grad_(False)
    one = megatron(run, lr=0.1)
    for parameter in run.inner.parameters():
        parameter.requires_grad_(parameter is not run.inner.frozen and not parameter.requires_grad)
    two = megatron(run)
    run.inner.requires_grad_(True)
    run.inner.frozen.requires_grad_(False)
    for step in range(2):
        run.compute(step)
        one.step()
        two.step()


@scenario(settings={"fsdp2": {"reshard_after_forward": False}})
def parameters_are_frozen_and_thawed_after_a_forward_without_backward(run: Run) -> None:
    for step, trains in enumerate((True, False, True)):
        run.forward(step)  # with a graph: what it gathers waits for the backward
        run.inner.blocks[0].requires_grad_(trains)
        run.train(1, first=step)


@scenario(optimizer=lambda run: megatron(run, weight_decay=0.1, clip_grad=1.0))
def frozen_parameters_do_not_decay(run: Run) -> None:
    run.train()
    run.inner.head.requires_grad_(False)
    run.train(2, first=1)


@scenario(
    "a_step_of_torch_without_finalizing",
    optimizer=torchs,
    raises=for_kinds(BUFFERED, r"step\(\) was called before the gradients|SGD was to step"),
)
@scenario(optimizer=megatron, raises=for_kinds(KINDS, r"step\(\) was called before the gradients"))
def a_step_without_finalizing(run: Run) -> None:
    run.zero()
    run.backward(0)
    if run.is_plain:
        run.finish()
    run.step()


@scenario()
def two_steps_with_one_gradient(run: Run) -> None:
    run.compute(0)
    run.step()
    run.step()


@scenario(optimizer=None)
def the_optimizer_is_built_after_a_forward(run: Run) -> None:
    run.forward()
    run.optimizer = megatron(run)
    run.train(2)


@scenario(optimizer=None, only=("fsdp2",), raises={"fsdp2": "was built while parameter .* was gathered"})
def an_optimizer_of_torch_is_built_after_a_forward(run: Run) -> None:
    run.forward()
    run.optimizer = torchs(run)
    run.train()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@scenario(make=Double, optimizer=lambda run: megatron(run, clip_grad=0.01), rtol=1e-14)  # 2^-53 times 100 additions
def double_precision_is_clipped_in_double(run: Run) -> None:
    run.train(2)
