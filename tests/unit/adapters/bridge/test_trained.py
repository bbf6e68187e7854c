"""The norm of a wrapped model's gradient: how it is measured takes no memory of the size of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from core.adapters.bridge.trained import GradientNorm
from core.distributed import wrap_model
from core.distributed.fully_sharded_data_parallel_config import config_of
from tests.unit._spawn import on_ranks


class _Casts(TorchDispatchMode):
    """Counts elements that are copied into another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params", "fsdp2"])
@on_ranks(2)
def test_a_model_in_bf16_is_measured_without_fp32_copies(strategy: str) -> None:
    model = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    wrapper = wrap_model(model, SimpleNamespace(), config_of(strategy), process_group=dist.group.WORLD)
    wrapper(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
    wrapper.finish_grad_sync()
    with _Casts() as casts:
        norm = GradientNorm(wrapper)
    assert casts.elements == 0
    assert norm.clip(1.0).item() == 8.0, "64 ones"
    # A bf16 gradient of 1/8 after clipping, whose coefficient of 1 / (8 + 1e-6) rounds to it.
    assert norm.clip(1.0).item() == 1.0
