"""The contract of every wrapper, kept for a model that its trainer calls without one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from core.adapters.nemo import fsdp2_strategy_parallelize
from core.base.errors import ShardstackError
from tests.unit._spawn import run_distributed
from tests.unit.adapters._adapters import Net, batch


def _keeps_the_contract() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, tokens = fsdp2_strategy_parallelize(Net(), mesh, MixedPrecisionPolicy()), batch(0, 0, dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(ShardstackError, match="create_graph=True"):
        model(tokens).backward(create_graph=True)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(tokens).backward()
    with pytest.raises(ShardstackError, match="before the gradients of the step were reduced"):
        optimizer.step()
    model.set_requires_gradient_sync(True)
    model(tokens).backward()
    optimizer.step()
    assert any(not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_step_without_a_reduction_raises_without_a_wrapper():
    run_distributed(_keeps_the_contract, 2)
