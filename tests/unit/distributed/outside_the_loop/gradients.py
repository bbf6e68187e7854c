"""Scenarios of gradients: who zeroes, writes, clips and reads them, and when they are finished."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.unit.distributed._toys import full, loss_of, toy
from tests.unit.distributed.outside_the_loop.scenario import (
    KINDS,
    SHARDED,
    Run,
    batch,
    bf16_toy,
    for_kinds,
    megatron,
    scenario,
)

IN_FP32 = {kind: {"grad_reduce_in_fp32": True} for kind in ("ddp", "ddp_overlap")}
"""Gradients are in another dtype than parameters in bf16, so that ``param.grad`` cannot be their memory."""
LOW: dict[str, Any] = {
    "make": bf16_toy,
    "only": tuple(IN_FP32),
    "settings": IN_FP32,
    "rtol": 2e-2,  # bf16 has 2^-8
    "optimizer": lambda run: megatron(run, optimizer="sgd", lr=1.0, sgd_momentum=0.0),
}
REDUCED_AGAIN = {"raises": for_kinds(SHARDED, "a backward added gradients after"), "rtol": 1e-6}
"""What was reduced is reduced again: 2^-24 an addition."""


@scenario("gradients_in_fp32_add_up_over_steps_that_zero_none", **LOW)
@scenario(**REDUCED_AGAIN)
def gradients_add_up_over_steps_that_zero_none(run: Run) -> None:
    run.train(3, zeroes=False)


@scenario()
def the_optimizer_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=step != 1)
        run.forget()
        run.train(first=step, zeroes=False)


@scenario()
def the_module_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad(set_to_none=step != 1)
        run.forget()
        run.train(micro_batches=1, first=step, zeroes=False)


@scenario(raises=for_kinds(SHARDED, "a backward added gradients after"))
def gradients_are_set_to_none_by_hand(run: Run) -> None:
    for step in range(3):
        for parameter in run.inner.parameters():
            parameter.grad = None
        run.train(micro_batches=1, first=step, zeroes=False)


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"))
def gradients_are_halved_by_hand(run: Run) -> None:
    run.train()
    run.compute(1)
    for index, parameter in enumerate(p for p in run.inner.parameters() if p.grad is not None):
        if index % 2:
            parameter.grad.mul_(0.5)
        else:
            parameter.grad = parameter.grad * 0.5
    run.step()
    run.train(1, first=2)


@scenario(only=("ddp", "ddp_overlap", "fsdp2", "zero1"), raises={"zero1": "has a .grad of its own"})
def a_gradient_is_written_before_the_step(run: Run) -> None:
    run.train()
    run.compute(1)
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25).detach()
    run.step()


@scenario()
def some_gradients_are_set_to_none_before_the_step(run: Run) -> None:
    for step in range(3):
        run.compute(step)
        if step:  # as of a last layer that is trained later
            run.inner.head.weight.grad = run.inner.blocks[0].gain.grad = None
        run.step()
    run.train(1, first=3)


@scenario(**LOW)
def gradients_in_fp32_are_set_to_none_by_hand(run: Run) -> None:
    for step in range(3):
        run.inner.zero_grad()
        run.backward(step)
        run.finish()
        if step:
            run.inner.head.weight.grad = None
        run.step()


@scenario(**LOW | {"optimizer": megatron}, raises=for_kinds(KINDS, "a gradient was read from param.grad"))
def torch_clips_the_gradients_in_fp32(run: Run) -> None:
    run.compute(0)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


@scenario(only=("ddp", "zero1", "zero2"))
def a_gradient_is_written_before_it_is_reduced(run: Run) -> None:
    run.zero()
    if not run.is_plain:
        run.backward(1, is_last=False)
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)
    run.finish_and_step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"), rtol=1e-5)  # the norm is added in fp32
def torch_clips_the_gradients(run: Run) -> None:
    for step in range(2):
        run.compute(step)
        norm = full(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        assert norm > 0.1
        run.step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"), rtol=1e-5)  # the norm is added in fp32
def torch_clips_the_gradients_after_a_loss_is_monitored(run: Run) -> None:
    for step in range(2):
        run.compute(step)
        run.forward(step + 1)  # with a graph, and no backward
        assert full(torch.nn.utils.clip_grad_norm_(run.inner.parameters(), 0.1)) > 0.1
        run.step()


@scenario(raises=for_kinds(KINDS, "finalize_model_grads was called twice"))
def finalizing_twice(run: Run) -> None:
    run.compute(0)
    run.finish()


@scenario("a_backward_between_finalizing_in_fp32_and_the_step", **LOW)
@scenario(**REDUCED_AGAIN)
def a_backward_between_finalizing_and_the_step(run: Run) -> None:
    run.compute(0)
    run.backward(1)
    run.finish_and_step()


@scenario(raises=for_kinds(KINDS, r"a backward added gradients after|step\(\) was called before the gradients"))
def a_backward_after_finalizing_that_is_not_finalized(run: Run) -> None:
    run.compute(0)
    run.backward(1)
    run.step()


@scenario(raises=for_kinds(KINDS, "a backward with create_graph=True reached"))
def a_graph_of_gradients(run: Run) -> None:
    run.zero()
    loss_of(run.model, batch(0, 0)).backward(create_graph=True)
    if run.is_plain:
        run.zero()


@scenario(raises={"fsdp2": "a backward with create_graph=True reached"})
def a_penalty_on_gradients(run: Run) -> None:
    run.zero()
    loss = loss_of(run.model, batch(0, 0))
    (gradient,) = torch.autograd.grad(loss, [run.inner.head.weight], create_graph=True)
    assert gradient.square().sum() > 0


@scenario()
def the_last_micro_batch_is_named_by_require_backward_grad_sync(run: Run) -> None:
    for step in range(2):
        run.zero()
        for index in range(3):
            run.model.require_backward_grad_sync = index == 2  # torch's DDP has it; of a plain module nothing reads it
            run.backward(step + index)
        run.finish_and_step()


def _toy_with_gradients() -> nn.Module:
    module = toy(tied=False)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.25) if parameter.requires_grad else None
    return module


@scenario(
    make=_toy_with_gradients,
    raises={"fsdp2": "has a .grad from before the model is wrapped.*set it to None"},
    rtol=1e-6,
)  # added before the mean over ranks instead of after it
def gradients_from_before_wrapping_are_added_to(run: Run) -> None:
    run.backward(0)
    run.finish_and_step()
    run.train(1, first=1)
