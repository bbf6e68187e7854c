"""Instances of one rank each: groups to shard over that hold a single rank, and replicas that have to stay equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core import parallel_state
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import UNITS, accumulate, full, gradients, oracle, settings, toy


def _trains(kind: str, every: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns gradients of the first step, and weights after three steps on this rank's own batches."""
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp_config = settings(kind, num_distributed_optimizer_instances=2, reduce_every_micro_batch=every)
    model = wrap_model(toy(), SimpleNamespace(), ddp_config, sub_modules_to_wrap=UNITS)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.1), [model])
    first: dict[str, torch.Tensor] = {}
    for _ in range(3):
        model.zero_grad_buffer()
        accumulate(model)
        finalize_model_grads([model])
        first = first or gradients(model)
        optimizer.step()
    return first, {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "every"),
    [*((kind, False) for kind in ("zero1_overlap", "zero2", "zero3", "fsdp2"))]
    + [(kind, True) for kind in ("zero2_overlap", "zero3", "fsdp2")],
)
def test_one_rank_groups_scale_nothing_and_replicas_stay_equal(kind: str, every: bool) -> None:
    (gradient, weights), (other_gradient, other_weights) = run_distributed(_trains, 2, kind, every)
    for name, expected in oracle().items():
        # Reducing every micro-batch adds the six addends in another order: a few bits, where a factor would be 2.
        torch.testing.assert_close(gradient[name], expected, rtol=1e-5 if every else 0, atol=1e-7 if every else 0)
        assert torch.equal(gradient[name], other_gradient[name]), name
    start = toy().state_dict()
    assert not torch.equal(weights["head.weight"], start["head.weight"])
    assert all(torch.equal(weights[name], other_weights[name]) for name in start)
