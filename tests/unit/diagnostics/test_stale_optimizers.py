"""An optimizer that holds the parameters from before wrapping says so at its step, instead of changing nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from core.diagnostics.stale_optimizers import reject_replaced
from core.distributed import finalize_model_grads
from core.errors import OptimizerError
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, loss_of, toy


def _steps_stale_optimizers() -> None:
    module = toy()
    stale = torch.optim.SGD(module.parameters(), lr=0.1)
    stale_megatron = get_megatron_optimizer(OptimizerConfig(lr=0.1), [module])
    model = build("fsdp2", module)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batches(dist.get_rank())[0]).backward()
    finalize_model_grads([model])
    with pytest.raises(
        OptimizerError,
        match=r"^SGD was built before the model was wrapped: it holds the old parameter frozen.*build the optimizer "
        r"afterwards.*get_megatron_optimizer",
    ):
        stale.step()
    with pytest.raises(OptimizerError, match=r"the optimizer was built before the model was wrapped"):
        stale_megatron.step()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    fresh.step()
    assert any(not torch.equal(b, p.to_local()) for b, p in zip(before, model.parameters(), strict=True))


def test_an_optimizer_built_before_wrapping_names_the_fix():
    run_distributed(_steps_stale_optimizers, 2)


def _frees_unreferenced_parameters() -> None:
    module = toy()
    old = weakref.ref(module.blocks[0].up.weight)
    kept = module.blocks[0].down.weight
    build("fsdp2", module)
    gc.collect()  # what an earlier test of the process left may have put it into a cycle
    assert old() is None
    with pytest.raises(OptimizerError, match=r"holds the old parameter blocks\.0\.down\.weight"):
        reject_replaced("SGD", kept)


def test_marking_keeps_no_old_parameter_alive():
    run_distributed(_frees_unreferenced_parameters, 1)


def _steps_after_a_move_into_buffers() -> None:
    module = toy()
    stale = get_megatron_optimizer(OptimizerConfig(lr=0.1), [module])
    build("zero1", module)
    with pytest.raises(OptimizerError, match=r"a wrapper that moved it into its buffers.*build the optimizer after"):
        stale.step()


def test_buffers_that_took_the_parameters_over_are_noticed_too():
    run_distributed(_steps_after_a_move_into_buffers, 1)
