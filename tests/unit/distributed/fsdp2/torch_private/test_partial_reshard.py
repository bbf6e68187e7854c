"""Units that two of four ranks keep whole between forward and backward."""

from __future__ import annotations

import torch

from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, full, loss_of, toy


def _step_after_an_unused_forward(reshard_after_forward: int | bool) -> list[torch.Tensor]:
    model = build("fsdp2", toy(), reshard_after_forward=reshard_after_forward)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    (tokens,) = batches(model.process_group.rank(), 1)
    loss_of(model, tokens).backward()
    finalize_model_grads([model])
    loss_of(model, tokens)  # with a graph that no backward uses
    optimizer.step()
    return [full(parameter) for parameter in model.module.parameters()]


def test_a_forward_before_the_update_changes_nothing():
    partly, fully = (run_distributed(_step_after_an_unused_forward, 4, reshard)[0] for reshard in (2, True))
    assert all(map(torch.equal, partly, fully))
