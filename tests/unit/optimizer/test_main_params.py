"""A parameter as the update sees it: storage shared or mastered, gradients picked, stale storage noticed.

What something else writes into parameters in low precision reaches their masters before they are read.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from core.base.errors import OptimizerError
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.main_params import MainParam, low_precision_weights, refresh_masters, refresh_parameters


def _main_param(module: nn.Module, attribute: str = "weight") -> MainParam:
    return MainParam(f"layer.{attribute}", getattr(module, attribute), module, attribute)


def test_full_precision_parameter_needs_no_copy():
    layer = nn.Linear(3, 2)
    main = _main_param(layer).main
    assert main.data_ptr() == layer.weight.data_ptr() and not main.requires_grad
    assert _main_param(nn.Linear(3, 2, dtype=torch.float64)).main.dtype == torch.float64


def test_a_low_precision_parameter_has_a_master():
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    p = _main_param(layer)
    assert p.main.dtype == torch.float32 and torch.equal(p.main, layer.weight.float())
    p.main.fill_(1.0009765625)
    refresh_parameters(low_precision_weights([p]))
    assert torch.equal(layer.weight, torch.ones_like(layer.weight))
    with torch.no_grad():
        layer.weight.fill_(3.0)
    refresh_masters([p])
    assert torch.equal(p.main, torch.full((2, 3), 3.0))


def test_main_grad_takes_precedence():
    layer = nn.Linear(3, 2)
    weight, bias = _main_param(layer), _main_param(layer, "bias")
    assert weight.take_gradient() is None
    layer.weight.grad, layer.bias.grad = torch.ones(2, 3), torch.ones(2)
    layer.weight.main_grad = torch.full((2, 3), 2.0)  # type: ignore[assignment]
    layer.bias.main_grad = None  # type: ignore[assignment]
    actual = weight.take_gradient(), bias.take_gradient()
    assert actual[0] is not None and actual[0].data_ptr() == layer.weight.main_grad.data_ptr()
    assert actual[1] is not None and actual[1].data_ptr() == layer.bias.grad.data_ptr()


def test_mismatched_gradients_are_refused_by_name():
    layer = nn.Linear(3, 2)
    layer.weight.main_grad = torch.zeros(4, 3)  # type: ignore[assignment]
    with pytest.raises(OptimizerError, match=r"layer.weight has shape \[4, 3\] where this rank holds \[2, 3\]"):
        _main_param(layer).take_gradient()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"layer.weight has a sparse gradient"):
        _main_param(embedding).take_gradient()
    with pytest.raises(OptimizerError, match=r"layer.weight is on the meta device"):
        _main_param(nn.Linear(3, 2, device="meta"))


def _replace_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


def _load_by_assignment(layer: nn.Linear) -> None:
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)


def _cast(layer: nn.Linear) -> None:
    layer.to(torch.float16)


@pytest.mark.parametrize("replace", [_replace_data, _load_by_assignment, _cast])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_storage_is_detected(replace, dtype: torch.dtype):
    layer = nn.Linear(3, 2, dtype=dtype)
    p = _main_param(layer)
    p.check_storage()
    replace(layer)
    with pytest.raises(OptimizerError, match=r"storage of parameter layer.weight was replaced"):
        p.check_storage()


def _trained() -> tuple[nn.Linear, MegatronOptimizer]:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.1)  # nothing that a step brings near what the tests write
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "master",
    [lambda o: o.state_tensors()["master.weight"], lambda o: o.state_dict()["tensors"]["master.weight"]],
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
