"""What something else writes into parameters in low precision reaches their masters, before they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer


def _trained() -> tuple[nn.Linear, MegatronOptimizer]:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.1)  # nothing that a step brings near what the tests write
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "master",
    [lambda o: o.state_tensors()["master.weight"], lambda o: o.state_dict()["masters"]["weight"]],
    ids=["state_tensors", "state_dict"],
)
def test_checkpoint_includes_just_written_parameters(master: Callable[[MegatronOptimizer], Tensor]):
    model, optimizer = _trained()
    with torch.no_grad():
        model.weight.fill_(0.375)
    assert torch.equal(master(optimizer), torch.full((2, 3), 0.375))


def _exchange(dim: int, one: int, other: int) -> Callable[[Tensor], Tensor]:
    def exchange(weight: Tensor) -> Tensor:
        order = list(range(weight.shape[dim]))
        order[one], order[other] = other, one
        return weight.index_select(dim, torch.tensor(order))

    return exchange


@pytest.mark.parametrize("shape", [(6, 4), (64, 16), (40, 640), (8192, 8), (6000, 5), (64000,)])
@pytest.mark.parametrize(
    "change",
    [_exchange(0, 0, 4), _exchange(0, 2, 3), _exchange(-1, 0, 3), lambda w: w.flip(-1), lambda w: w.roll(4, 0)],
    ids=["rows", "neighbouring rows", "columns", "flipped", "rolled"],
)
def test_values_that_change_places_reach_masters(shape: tuple[int, ...], change: Callable[[Tensor], Tensor]):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape).bfloat16())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    before = model.weight.detach().clone()
    model.weight.data.copy_(change(before))
    masters = optimizer.state_tensors()["master.weight"]
    assert torch.equal(masters, change(before).float())
    if len(shape) > 1:
        assert not torch.equal(masters, before.float())


def test_a_checkpoint_has_the_digits_of_masters():
    model, optimizer = _trained()
    masters = optimizer.state_tensors()["master.weight"].clone()
    with torch.no_grad():
        model.weight[0] = 0.375
    actual = optimizer.state_tensors()["master.weight"]
    assert torch.equal(actual[1], masters[1]) and not torch.equal(actual[1].bfloat16().float(), actual[1])
