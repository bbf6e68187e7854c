"""A sharded parameter that is used outside its unit, or loaded from a plain tensor, is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional as F

from core.base.errors import CheckpointError, UnitError
from core.diagnostics import failures_explained
from core.dist_checkpointing import load_model_state_dict
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Block, batches, build, full, loss_of, toy

WAYS_OUT = (
    "Call that unit's forward",
    "through sub_modules_to_wrap",
    "forward_methods of TorchFullyShardedDataParallelConfig",
)


class _Reads(nn.Module):
    """A root whose forward takes a weight of a unit."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].up.weight
        if self.how == "whole":
            return F.linear(x, weight)
        if self.how == "view":
            return x @ weight.t()
        if self.how == "inner":
            return self.blocks[1].up(x)
        return self.blocks[0](x) + x * self.blocks[0].gain


def _message(model: Any, *args: Any) -> str:
    with pytest.raises(UnitError) as caught:
        model(*args)
    assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "parameter", "unit", "code"),
    [
        ("whole", "blocks.1.up.weight", "blocks.1", "return F.linear(x, weight)"),
        ("view", "blocks.1.up.weight", "blocks.1", "return x @ weight.t()"),
        ("inner", "blocks.1.up.weight", "blocks.1", "return self.blocks[1].up(x)"),
        ("gain", "blocks.0.gain", "blocks.0", "return self.blocks[0](x) + x * self.blocks[0].gain"),
    ],
)
@on_ranks(2)
def test_a_forward_that_reads_another_units_weight_names_it(how, parameter, unit, code):
    message = _message(build("fsdp2", _Reads(how), unit_classes=(Block,)), torch.ones(2, 7))
    assert message.startswith(f"parameter {parameter} was used outside the forward of its unit, {unit}, where")
    assert f"in forward: {code})" in message
    assert all(way in message for way in WAYS_OUT)


@on_ranks(1)
def test_a_call_past_the_wrapper_is_explained_inside_the_context():
    model = build("fsdp2", toy(), config=SimpleNamespace())
    with pytest.raises(RuntimeError, match="mixed"):
        model.module.blocks[0].up(torch.ones(2, 7))  # calls that bypass the wrapper are not watched
    with pytest.raises(UnitError) as caught, failures_explained(model):
        model.module.blocks[0].up(torch.ones(2, 7))
    message = str(caught.value)
    assert message.startswith("parameter blocks.0.up.weight was used outside the forward of its unit, blocks.0, where")


@on_ranks(1)
def test_other_errors_pass_as_they_are() -> None:
    model = build("fsdp2", toy())
    with pytest.raises(IndexError):
        model(torch.full((1, 2), 99))
    with pytest.raises(RuntimeError, match="size of tensor") as caught, failures_explained(model):
        torch.ones(2) + torch.ones(3)
    assert type(caught.value) is RuntimeError


@on_ranks(2)
def test_a_plain_state_dict_names_the_function_that_loads_it() -> None:
    plain = toy(seed=2).state_dict()
    model = build("fsdp2", toy(seed=1))
    says = r"given frozen as a plain tensor of shape \[3\].*shardstack\.dist_checkpointing\.load_model_state_dict"
    for assign in (False, True):
        with pytest.raises(CheckpointError, match=says):
            model.module.load_state_dict(plain, assign=assign)
    with pytest.raises(CheckpointError, match=r"given gain as a plain tensor"):
        model.module.blocks[0].load_state_dict(toy(seed=2).blocks[0].state_dict())
    loss_of(model, batches(0)[0])  # the last unit and the root stay gathered
    with pytest.raises(CheckpointError, match=r"shardstack\.dist_checkpointing\.load_model_state_dict"):
        model.module.load_state_dict(plain)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=1).parameters(), strict=True))

    model.zero_grad_buffer()  # torch would take the gathered parameters of the root for those to load
    options = StateDictOptions(full_state_dict=True)  # torch's own way, which cuts what it is given first
    set_model_state_dict(model.module, toy(seed=3).state_dict(), options=options)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=3).parameters(), strict=True))
    load_model_state_dict(model.module, plain)
    model.module.load_state_dict(model.module.state_dict())  # its own shards are taken
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), toy(seed=2).parameters(), strict=True))
