"""Values of a trainer as JSON, and what a checkpoint of another optimizer says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.adapters.bridge.checkpoints import load_trained, save_trained
from core.adapters.bridge.trained import Trained
from core.base.errors import CheckpointError
from core.dist_checkpointing import load_metadata
from core.dist_checkpointing.format.json_values import decode, encode
from core.distributed import wrap_model
from core.distributed.fully_sharded_data_parallel_config import config_of
from tests.unit._spawn import on_ranks

VALUES: list[Any] = [
    {"a": (1, 2.5, None), "b": {3, 4}, "__tuple__": "a key like a kind"},
    {1: "one", (2, "b"): [True]},
    [math.inf, "text"],
]


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back_through_json(value):
    tensors: dict[str, torch.Tensor] = {}
    assert decode(json.loads(json.dumps(encode(value, "v", tensors))), tensors.__getitem__) == value
    assert not tensors


def test_tensors_of_values_are_named_by_their_place():
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode({"a": [torch.ones(2)]}, "v", tensors)
    assert list(tensors) == ["v.a.0"]
    assert torch.equal(decode(encoded, tensors.__getitem__)["a"][0], torch.ones(2))


def test_earlier_checkpoints_load_and_odd_values_are_refused():
    assert decode({"__items__": [[1, "one"]]}, {}.__getitem__) == {1: "one"}
    for odd in ({"__float__": "a"}, {"__items__": 3}, {"__tensor__": "absent"}):
        with pytest.raises(CheckpointError, match="hold an invalid __"):
            decode(odd, {}.__getitem__)


def _trained(momentum: float = 0.9, bf16: bool = True, strategy: str = "optim") -> Trained:
    torch.manual_seed(2)
    model = nn.Linear(4, 4, dtype=torch.bfloat16 if bf16 else None)
    trained = Trained(wrap_model(model, SimpleNamespace(), config_of(strategy), process_group=dist.group.WORLD))
    trained.take(torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))
    return trained


def _step(trained: Trained) -> None:
    weight = next(trained.wrapper.module.parameters())
    trained.wrapper(torch.ones(1, 4, dtype=weight.dtype) / 3).float().sum().backward()
    trained.wrapper.finish_grad_sync()
    trained.step()


def _masters(trained: Trained) -> dict[str, torch.Tensor]:
    state = trained.updates.state_tensors().items()
    return {name: value.elements.clone() for name, value in state}


@on_ranks(2)
def test_bf16_masters_are_saved_in_place_of_weights(tmp_path) -> None:
    trained = _trained()
    _step(trained)
    save_trained(Path(tmp_path, "now"), trained, trained.model_tensors())
    assert load_metadata(tmp_path / "now")["model_tensors"] == ["model.bias", "model.weight"]
    state = _masters(trained)
    _step(trained)
    expected = _masters(trained)
    again = _trained()
    for group in again.optimizer.param_groups:
        group["lr"] = 7.0
    load_trained(Path(tmp_path, "now"), again, again.model_tensors())
    assert again.optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(value, state[name]) for name, value in _masters(again).items())
    _step(again)
    assert all(torch.equal(value, expected[name]) for name, value in _masters(again).items())


@on_ranks(2)
def test_state_that_an_optimizer_would_drop_is_refused(tmp_path) -> None:
    trained = _trained(bf16=False)
    _step(trained)
    save_trained(Path(tmp_path, "a"), trained, trained.model_tensors())
    without = _trained(momentum=0.0, bf16=False)
    before = {name: tensor.clone() for name, tensor in without.wrapper.module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"only one side has optimizer\.momentum_buffer"):
        load_trained(Path(tmp_path, "a"), without, without.model_tensors())
    with pytest.raises(CheckpointError, match=r"only one side has model\.bias"):
        load_trained(Path(tmp_path, "a"), trained, {"weight": trained.model_tensors()["weight"]})
    assert all(torch.equal(t, before[n]) for n, t in without.wrapper.module.state_dict().items()), "nothing is written"
    load_trained(Path(tmp_path, "a"), without, without.model_tensors(), with_optimizer=False)
