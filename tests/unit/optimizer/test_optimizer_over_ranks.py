"""One step of the whole optimizer under FSDP2 and under the wrappers equals that of replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.optimizer._model import Model, batch, full, optimizer_config


def _replicated_run(name: str, fault: str) -> list[tuple[float | None, dict[str, Tensor]]]:
    """Trains a whole model on each rank with gradients averaged by hand, some in `main_grad`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = get_megatron_optimizer(optimizer_config(optimizer=name), [model])
    trace = []
    for step in range(6):
        model(batch(step, dist.get_rank())).backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= 3 if fault == "scaled" else 2
        model.first.weight.main_grad, model.first.weight.grad = model.first.weight.grad, None  # type: ignore[assignment]
        _, norm, _ = optimizer.step()
        optimizer.zero_grad()
        trace.append((norm, {key: full(value) for key, value in model.state_dict().items()}))
    return trace


def _sharded_run(name: str) -> list[tuple[float | None, dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh)
    optimizer = get_megatron_optimizer(optimizer_config(optimizer=name), [model])
    trace = []
    for step in range(6):
        model(batch(step, dist.get_rank())).backward()
        _, norm, _ = optimizer.step()
        optimizer.zero_grad()
        trace.append((norm, {key: full(value) for key, value in model.state_dict().items()}))
    return trace


def _differences(name: str, fault: str) -> int:
    differing = 0
    for (norm, weights), (sharded_norm, sharded) in zip(_replicated_run(name, fault), _sharded_run(name), strict=True):
        assert norm is not None and norm > 0.7  # else nothing is clipped, and the norm would not be felt
        differing += norm != sharded_norm or any(not torch.equal(weights[key], sharded[key]) for key in weights)
    return differing


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_fsdp2_equals_replication_bitwise(name: str):
    assert run_distributed(_differences, 2, name, "") == [0, 0]


def _wrapped_run(ddp_config: Any) -> tuple[list[float | None], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model = wrap_model(Model(), None, ddp_config, process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(optimizer_config(), [model])
    norms = []
    for step in range(3):
        model.zero_grad_buffer()
        model(batch(step, dist.get_rank())).backward()
        finalize_model_grads([model])
        norms.append(optimizer.step()[1])
    weights = {key: full(value) for key, value in model.state_dict().items()}
    return norms, weights, sorted(optimizer.state_tensors())


def _wrappers_agree() -> bool:
    norms, weights, states = _wrapped_run(DistributedDataParallelConfig())
    sharded_norms, sharded, sharded_states = _wrapped_run(TorchFullyShardedDataParallelConfig())
    assert weights.keys() == sharded.keys() and states == sharded_states
    return norms == sharded_norms and all(torch.equal(weights[key], sharded[key]) for key in weights)


def test_wrappers_have_equal_steps_and_state_names():
    assert run_distributed(_wrappers_agree, 2) == [True, True]


def test_scaled_gradient_is_detected():
    assert run_distributed(_differences, 2, "adam", "scaled") == [6, 6]
