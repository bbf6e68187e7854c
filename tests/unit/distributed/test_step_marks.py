"""Marks on parameters: what an optimizer of any kind meets, in which order, and what it costs those that meet none."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as torch_optimizer

from core.base.errors import OptimizerError
from core.base.memory_categories import known_optimizers
from core.distributed import finalize_model_grads
from core.distributed.step_marks import StepMark, mark_of, note_own_optimizer, reject_replaced, set_mark
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import batches, build, loss_of, toy


class Noting(StepMark):
    def __init__(self) -> None:
        self.said: list[str] = []

    def refuse(self, optimizer: str) -> None:
        self.said.append(f"refuse {optimizer}")

    def check_gradients(self, optimizer: str) -> None:
        self.said.append(f"check {optimizer}")

    def note_step(self) -> None:
        self.said.append("stepped")


def _marked(number: int = 2) -> tuple[list[nn.Parameter], Noting]:
    params, mark = [nn.Parameter(torch.zeros(2)) for _ in range(number)], Noting()
    for param in params:
        set_mark(param, mark)
    return params, mark


def test_a_mark_on_several_parameters_is_called_once_a_step():
    params, mark = _marked()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1)), *params], lr=0.1)
    optimizer.step()
    assert mark.said == ["refuse SGD", "check SGD", "stepped"]
    assert optimizer in known_optimizers()
    assert mark_of(copy.deepcopy(params[0])) is None


def test_gradients_of_a_closure_are_checked_once_computed():
    params, mark = _marked()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        mark.said.clear()
        step(lambda: mark.said.append("closure"))
        assert mark.said == ["refuse SGD", "closure", "check SGD", "stepped"]


def test_every_mark_may_refuse_before_any_is_asked_for_gradients():
    (first,), mark = _marked(1)

    class Refusing(StepMark):
        def refuse(self, optimizer: str) -> None:
            raise ValueError("refused")

    second = nn.Parameter(torch.zeros(1))
    set_mark(second, Refusing())
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    with pytest.raises(ValueError, match="refused"):
        optimizer.step()
    assert mark.said == ["refuse SGD"]
    optimizer.param_groups[0]["params"] = [first]
    optimizer.step()
    assert mark.said == ["refuse SGD", "refuse SGD", "check SGD", "stepped"]


def test_an_own_optimizer_is_passed_over_and_known():
    params, mark = _marked()
    optimizer = torch.optim.SGD(params, lr=0.1)
    note_own_optimizer(optimizer, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    optimizer.step()
    assert mark.said == [] and optimizer in known_optimizers()


def test_an_optimizer_without_marks_is_not_kept_in_mind():
    _marked()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step()
    assert optimizer not in known_optimizers()
    assert not [name for name in vars(optimizer) if name.startswith("_marks")]


def test_there_is_one_hook_before_a_step_and_one_after_it():
    for _ in range(3):
        _marked()
    for hooks in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks):
        assert [hook.__module__ for hook in hooks.values() if hook.__module__.startswith("shardstack.")] == [
            "shardstack.distributed.step_marks"
        ]


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_names_the_fix() -> None:
    module = toy()
    stale = torch.optim.SGD(module.parameters(), lr=0.1)
    stale_megatron = get_megatron_optimizer(OptimizerConfig(lr=0.1), [module])
    model = build("fsdp2", module)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batches(dist.get_rank())[0]).backward()
    finalize_model_grads([model])
    with pytest.raises(
        OptimizerError,
        match=r"^SGD was built before the model was wrapped: it holds the old parameter frozen.*give it to "
        r"shardstack\.optimizer\.shard_optimizer",
    ):
        stale.step()
    with pytest.raises(OptimizerError, match=r"the optimizer was built before the model was wrapped"):
        stale_megatron.step()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    fresh.step()
    assert any(not torch.equal(b, p.to_local()) for b, p in zip(before, model.parameters(), strict=True))


@on_ranks(1)
def test_marking_keeps_no_old_parameter_alive() -> None:
    module = toy()
    old = weakref.ref(module.blocks[0].up.weight)
    kept = module.blocks[0].down.weight
    build("fsdp2", module)
    gc.collect()  # what an earlier test of the process left may have put it into a cycle
    assert old() is None
    with pytest.raises(OptimizerError, match=r"holds the old parameter blocks\.0\.down\.weight"):
        reject_replaced("SGD", kept)


@on_ranks(1)
def test_buffers_that_took_the_parameters_over_are_noticed_too() -> None:
    module = toy()
    stale = get_megatron_optimizer(OptimizerConfig(lr=0.1), [module])
    build("zero1", module)
    with pytest.raises(OptimizerError, match=r"a wrapper that moved it into its buffers.*build the optimizer after"):
        stale.step()
