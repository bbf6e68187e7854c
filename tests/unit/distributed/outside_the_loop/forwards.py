"""Scenarios of forwards and failures: evaluations at odd times, exceptions that are caught, units called alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.unit.distributed import _toys
from tests.unit.distributed.outside_the_loop.scenario import Run, failing, scenario


@scenario()
def a_backward_that_raises_is_caught(run: Run) -> None:
    run.train()
    run.zero()
    with failing(run.inner.blocks[0].register_full_backward_pre_hook):
        run.backward(3)
    run.train(2, first=1)


def _go_past(block: nn.Module, args: Any, output: Tensor) -> Tensor:
    return args[0]


@scenario()
def a_step_is_given_up_after_a_backward_that_reached_a_block_on_one_rank_alone(run: Run) -> None:
    run.train()
    run.zero()
    if not run.is_plain:
        handle = run.inner.blocks[1].register_forward_hook(_go_past) if dist.get_rank() == 1 else None
        run.backward(3)
        if handle is not None:
            handle.remove()
    run.train(2, first=1)


@scenario(raises={"fsdp2": "a backward of this step raised"})
def a_step_goes_on_after_a_backward_that_raised_and_is_made_again(run: Run) -> None:
    run.zero()
    with failing(run.inner.blocks[1].register_full_backward_pre_hook):
        run.backward(3)
    if not run.is_plain and isinstance(run.model.ddp_config, _toys.TorchFullyShardedDataParallelConfig):
        run.finish()
    run.train(1, first=1)


@scenario()
def a_forward_that_raises_is_caught_and_its_micro_batch_skipped(run: Run) -> None:
    run.train()
    run.zero()
    run.backward(1, is_last=False)
    with failing(run.inner.blocks[1].register_forward_pre_hook):
        run.backward(2, is_last=False)
    run.backward(3)
    run.finish_and_step()
    run.train(1, first=2)


@scenario()
def an_evaluation_that_raises_between_gradients_and_step(run: Run) -> None:
    run.train()
    run.compute(1)
    with torch.no_grad(), failing(run.inner.blocks[1].register_forward_pre_hook):
        run.forward()
    run.step()
    run.train(1, first=2)


@scenario()
def a_loss_is_monitored_between_gradients_and_step(run: Run) -> None:
    run.compute(0)
    run.forward(1)  # with a graph, and no backward
    run.step()
    run.train(1, first=1)


@scenario()
def an_evaluation_with_a_graph_before_each_step(run: Run) -> None:
    for step in range(2):
        run.forward(2)
        run.train(1, first=step)


@scenario()
def the_first_forward_is_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.forward()
    run.train(2)
    with torch.inference_mode():
        run.forward()
    run.train(1, first=2)


@scenario(settings={"fsdp2": {"keep_gathered_between_micro_batches": "all"}})
def a_unit_is_called_before_the_model(run: Run) -> None:
    x = torch.ones(2, 7)
    with torch.no_grad():
        run.inner.blocks[0](x)
    run.train()
    with torch.no_grad():
        found = run.inner.blocks[0](x)
    run.train(1, first=1)
    with torch.no_grad():
        assert not torch.equal(run.inner.blocks[0](x), found)


@scenario(only=("fsdp2",))
def lists_do_not_grow_in_evaluations(run: Run) -> None:
    run.train()
    lengths = set()
    for _ in range(3):
        with torch.no_grad():
            run.forward()
        if not run.is_plain:
            state = run.inner._get_fsdp_state()
            lengths.add((len(state._comm_ctx.post_forward_order), len(run.model.engine.parameters.order._order)))
    assert len(lengths) <= 1, lengths
