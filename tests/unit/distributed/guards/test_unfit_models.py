"""Models that no wrapper can train as the plain module would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core.base.errors import WrapError
from core.distributed import DistributedDataParallelConfig
from core.distributed.distributed_data_parallel_config import EngineKind
from core.distributed.groups import DataParallelGroups
from core.distributed.guards import PlainModel
from core.distributed.guards.unfit_models import DenseOnOneDevice

RANKS: Any = None


def reject_unfit(module: nn.Module) -> None:
    groups = DataParallelGroups(RANKS, RANKS)
    plain = PlainModel(module, None, DistributedDataParallelConfig(), groups, EngineKind.FLAT_BUFFERS)
    DenseOnOneDevice().at_wrap(plain)


class _OnAGPU(torch.Tensor):
    """A tensor without memory, which says that it is on a GPU."""

    @staticmethod
    def __new__(cls, size: int) -> _OnAGPU:
        return torch.Tensor._make_wrapper_subclass(cls, (size,), device=torch.device("cuda:0"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _OnAGPU:
        return cls(args[0].shape[0])  # of `detach`, which a parameter calls


def _on_two_devices(requires_grad: bool = True) -> nn.Module:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(_OnAGPU(2), requires_grad)
    return model


def test_a_model_trained_on_two_devices_is_refused():
    with pytest.raises(WrapError, match=r"trained on several devices .weight on cpu, bias on cuda:0.*move the model"):
        reject_unfit(_on_two_devices())


def test_frozen_parameters_and_meta_ones_may_be_elsewhere():
    reject_unfit(_on_two_devices(requires_grad=False))
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    reject_unfit(model)


@pytest.mark.parametrize("kind", ["a buffer", "a parameter"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_of_a_model_are_refused(kind, layout):
    module, eye = nn.Linear(3, 3), torch.eye(3).to_sparse(layout=layout)
    if kind == "a buffer":
        module.register_buffer("graph", eye, persistent=False)
    else:
        module.graph = nn.Parameter(eye)
    with pytest.raises(WrapError, match=f"graph has the layout {layout}.*dense tensor.*no buffer"):
        reject_unfit(module)
