"""Parameters that Megatron-LM marks as an expert's: refused where experts have ranks of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ParallelConfigError
from core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig, wrap_model
from tests.unit._spawn import run_distributed

SETTINGS = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(use_distributed_optimizer=True),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
}


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.fill_(dist.get_rank() + 1.0)
    model[1].weight.allreduce = False
    return model


def _refuses(setting: str, groups: dict[str, int], config: dict[str, int]) -> None:
    parallel_state.initialize_model_parallel(**groups)
    model = _model()
    with pytest.raises(ParallelConfigError, match=r"parameter 1.weight is marked allreduce=False.*expert_model_paral"):
        wrap_model(model, SimpleNamespace(**config), SETTINGS[setting])
    assert torch.equal(model[1].weight, torch.full((2, 2), dist.get_rank() + 1.0))
    model[1].weight.allreduce = True
    wrap_model(model, SimpleNamespace(**config), SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_expert_parameter_is_refused_before_it_is_overwritten(setting):
    run_distributed(_refuses, 2, setting, {"expert_model_parallel_size": 2}, {})


def test_the_config_or_the_experts_tensor_size_refuses_it():
    run_distributed(_refuses, 2, "ddp", {}, {"expert_model_parallel_size": 2})
    run_distributed(_refuses, 2, "ddp", {"expert_tensor_parallel_size": 2}, {})


def _reduces_over_all() -> None:
    parallel_state.initialize_model_parallel()
    model = _model()
    wrapped = wrap_model(model, SimpleNamespace(), SETTINGS["ddp"])
    model[1].weight.sum().mul(dist.get_rank() + 1.0).backward()
    wrapped.finish_grad_sync()
    assert torch.equal(model[1].weight.main_grad, torch.full((2, 2), 1.5))


def test_without_experts_the_mark_changes_nothing():
    run_distributed(_reduces_over_all, 2)
