"""Scenarios of gradients: who zeroes, writes, clips and reads them, and when they are finished."""

from __future__ import annotations

import torch

from tests.unit.distributed._toys import full, loss_of
from tests.unit.distributed.outside_the_loop.scenario import (
    KINDS,
    SHARDED,
    Run,
    batch,
    for_kinds,
    scenario,
)


@scenario(
    raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"), rtol=1e-6
)  # what was reduced is reduced again: 2^-24 an addition
def gradients_add_up_over_steps_that_zero_none(run: Run) -> None:
    for step in range(3):
        run.backward(step, is_last=False)
        run.backward(step + 1)
        run.finish()
        run.step()


@scenario()
def the_optimizer_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=step != 1)
        if run.is_plain:
            run.of_ranks = [{}, {}]
        run.backward(step, is_last=False)
        run.backward(step + 1)
        run.finish()
        run.step()


@scenario()
def the_module_zeroes_the_gradients(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad(set_to_none=step != 1)
        if run.is_plain:
            run.of_ranks = [{}, {}]
        run.backward(step)
        run.finish()
        run.step()


@scenario(raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"))
def gradients_are_set_to_none_by_hand(run: Run) -> None:
    for step in range(3):
        for parameter in run.inner.parameters():
            parameter.grad = None
        run.backward(step)
        run.finish()
        run.step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"))
def gradients_are_halved_by_hand(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1)
    run.finish()
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
    run.zero()
    run.backward(1)
    run.finish()
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25).detach()
    run.step()


@scenario(only=("ddp", "zero1", "zero2"))
def a_gradient_is_written_before_it_is_reduced(run: Run) -> None:
    run.zero()
    if not run.is_plain:
        run.backward(1, is_last=False)
    for parameter in run.inner.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)
    run.finish()
    run.step()


@scenario(raises=for_kinds(SHARDED, "a gradient was read from param.grad"), rtol=1e-5)  # the norm is added in fp32
def torch_clips_the_gradients(run: Run) -> None:
    for step in range(2):
        run.zero()
        run.backward(step)
        run.finish()
        norm = full(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        assert norm > 0.1
        run.step()


@scenario(raises=for_kinds(KINDS, "finalize_model_grads was called twice"))
def finalizing_twice(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.finish()


@scenario(
    raises=for_kinds(SHARDED, "a backward added gradients after|got a gradient after"), rtol=1e-6
)  # what was reduced is reduced again: 2^-24 an addition
def a_backward_between_finalizing_and_the_step(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
    run.backward(1)
    run.finish()
    run.step()


@scenario(raises=for_kinds(KINDS, r"a backward added gradients after|step\(\) was called before the gradients"))
def a_backward_after_finalizing_that_is_not_finalized(run: Run) -> None:
    run.zero()
    run.backward(0)
    run.finish()
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
