"""State of the whole optimizer: a run is resumed from it, and it is seen as the whole model's under FSDP2."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core.base.errors import CheckpointError
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.optimizer._model import Model, batch, local, optimizer_config


def _train(model: nn.Module, optimizer: MegatronOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.scale_loss(model(batch(step).to(next(model.parameters()).dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", ["state_tensors", "state_dict"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, dtype: torch.dtype, way: str):
    low = dtype == torch.float16
    config = optimizer_config(optimizer=name, fp16=low, initial_loss_scale=64.0, loss_scale_window=2)
    model = Model().to(dtype)
    optimizer = get_megatron_optimizer(config, [model])
    _train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_tensors(), optimizer.state_scalars()))
    saved_dict = copy.deepcopy(optimizer.state_dict())
    kinds = ["exp_avg", "exp_avg_sq"] if name == "adam" else ["momentum_buffer"]
    kinds += ["master"] if low else []
    assert list(saved[1]) == [f"{kind}.{key}" for key, _ in model.named_parameters() for kind in kinds]
    _train(model, optimizer, range(3, 6))

    resumed = Model().to(dtype)
    fresh = get_megatron_optimizer(config, [resumed])
    if way == "state_tensors":
        for key, tensor in fresh.state_tensors().items():
            tensor.copy_(saved[1][key])
        if not low:
            resumed.load_state_dict(saved[0])  # in low precision the masters bring the parameters with them
        fresh.load_state_scalars(saved[2])
    else:
        resumed.load_state_dict(saved[0])
        fresh.load_state_dict(saved_dict)
    assert all(torch.equal(value, saved[0][key]) for key, value in resumed.state_dict().items())
    _train(resumed, fresh, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    assert fresh.state_scalars() == optimizer.state_scalars()


def test_state_of_another_model_is_refused():
    optimizer = get_megatron_optimizer(optimizer_config(), [Model()])
    with pytest.raises(CheckpointError, match=r"does not have: third.weight"):
        optimizer.load_state_scalars({"step": 1, "step_of": {"third.weight": 2}, "grad_scaler": {}})
    half = get_megatron_optimizer(optimizer_config(), [Model().bfloat16()])
    with pytest.raises(
        CheckpointError, match=r"of first.bias it has \('fp32 master', .*, and this rank \('parameter'"
    ):
        optimizer.load_state_dict(half.state_dict())


@on_ranks(2)
def test_sharded_state_views_are_whole():
    expected = (["exp_avg.scale", "exp_avg_sq.scale"], True, 2)  # also where a rank holds nothing of `scale`
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    _train(model, optimizer, range(1))
    model(batch(1)).backward()
    model.unshard()  # the module now shows gathered parameters in place of those that were given to the optimizer
    optimizer.step()
    model.reshard()
    tensors = optimizer.state_tensors()
    shapes = all(tensors[f"exp_avg.{name}"].shape == param.shape for name, param in model.named_parameters())
    first = optimizer._params[0]
    shared = local(tensors[f"exp_avg.{first.name}"]).data_ptr()
    assert shared == optimizer.optimizer.state[first.main]["exp_avg"].data_ptr()
    assert ([key for key in tensors if key.endswith("scale")], shapes, optimizer.state_scalars()["step"]) == expected


STRATEGIES = ("optim", "optim_grads", "optim_grads_params", "fsdp2")


def _loads_states_of_ranks(strategy: str) -> tuple[str, bool]:
    fields: Any = {"data_parallel_sharding_strategy": strategy}
    ddp_config = (
        TorchFullyShardedDataParallelConfig() if strategy == "fsdp2" else DistributedDataParallelConfig(**fields)
    )
    model = wrap_model(Model(), None, ddp_config, process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    model(batch(0, dist.get_rank())).backward()
    finalize_model_grads([model])
    optimizer.step()
    own = copy.deepcopy(optimizer.state_dict())
    of_first = [own]
    dist.broadcast_object_list(of_first)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(of_first[0])
    optimizer.load_state_dict(own)
    again = optimizer.state_dict()
    return str(caught.value), again["cut"] == own["cut"] and len(again["tensors"]) > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_another_rank_is_refused(strategy: str):
    actual = run_distributed(_loads_states_of_ranks, 2, strategy)
    assert all(
        "the optimizer state of another rank, cut, precision or model was to be loaded" in text for text, _ in actual
    )
    assert len({text for text, _ in actual}) == 1 and "\n" not in actual[0][0]
    assert all(continues for _, continues in actual)


def test_a_state_of_another_form_is_refused():
    optimizer = get_megatron_optimizer(optimizer_config(), [Model()])
    state = optimizer.state_dict()
    for form in ({}, {"cut": state["cut"], "optimizer": {}, "masters": {}}):
        with pytest.raises(CheckpointError, match=r"has no .*scalars, tensors; load what state_dict\(\)"):
            optimizer.load_state_dict(form)
