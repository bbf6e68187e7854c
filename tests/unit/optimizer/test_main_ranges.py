"""The parameters of an optimizer are found in the wrapped model, also by those that wrapping has replaced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import OptimizerError
from core.optimizer.main_ranges import MainRange, collect_main_params, find_main_params
from tests.unit._spawn import on_ranks
from tests.unit.optimizer._own import CONFIGS, Net, wrapped


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_parameters_from_before_wrapping_are_found(kind: str) -> None:
    model = Net()
    before = dict(model.named_parameters())
    whole = wrapped(kind, model)
    found = find_main_params("SGD", list(before.values()), [whole])
    assert {p.name: given for given, p in found.items()} == before
    assert [p.param for p in found.values()] == list(model.parameters()), "in the model's order"
    some = find_main_params("SGD", list(model.norm.parameters()), [whole])
    assert [p.name for p in some.values()] == ["norm.weight", "norm.bias"]


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_ranks_have_the_parts_of_a_whole_tensor(kind: str) -> None:
    params = collect_main_params([wrapped(kind)])
    own, size = params[0].main.numel(), params[0].param.numel()
    assert kind == "ddp" or 0 < own < size, "a shard begins or ends inside a parameter"
    for p in params:
        values = torch.arange(float(p.param.numel())).view(p.param.shape)
        part = p.part_of(values)
        assert part.shape == p.main.shape
        assert isinstance(p, MainRange) is (kind in ("zero1", "zero2", "zero3"))
        numbers = [None, None]
        dist.all_gather_object(numbers, part.flatten().tolist())
        every = [number for of_rank in numbers for number in of_rank or ()]
        assert sorted(set(every)) == values.flatten().tolist()
        assert len(every) == len(set(every)) * (2 if kind == "ddp" else 1)


@pytest.mark.parametrize("kind", ["zero1", "fsdp2"])
@on_ranks(2)
def test_parameters_of_another_model_are_refused(kind: str) -> None:
    whole, other = wrapped(kind), Net()
    with pytest.raises(OptimizerError, match=r"^SGD was built for another model: 1 of its 2 parameters, .* \[61, 7\]"):
        find_main_params("SGD", [next(whole.module.norm.parameters()), other.embedding.weight], [whole])
    other.embedding.weight.requires_grad_(False)
    assert find_main_params("SGD", [other.embedding.weight], [whole]) == {}, "a frozen one is left alone"
    late = nn.Parameter(torch.zeros(2))
    whole.module.register_parameter("late", late)
    if kind == "zero1":
        with pytest.raises(OptimizerError, match="parameter late is in none of the wrapper's buffers"):
            find_main_params("SGD", [late], [whole])
