"""The wrapper for a trainer's settings: names of strategies, tables of translations, replicas as torch's DDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...distributed import DistributedDataParallel, DistributedDataParallelConfig, engine
from ...distributed.distributed_data_parallel_config import SHARDING_STRATEGIES

FSDP2 = "fsdp2"
STRATEGIES = (*SHARDING_STRATEGIES, FSDP2)
"""Those of ``data_parallel_sharding_strategy``, on flat buffers, and torch's FSDP2."""


def config_class(strategy: str) -> type[DistributedDataParallelConfig]:
    """Returns the class of the config of a strategy's wrapper."""
    return engine.config_class(strategy == FSDP2, strategy)


def config_of(strategy: str, **settings: Any) -> DistributedDataParallelConfig:
    """Returns the config of a strategy's wrapper; `settings` are its other fields.

    Raises:
        ParallelConfigError: settings that contradict each other.
    """
    kind = config_class(strategy)
    if kind is DistributedDataParallelConfig:
        return kind(data_parallel_sharding_strategy=strategy, **settings)
    return kind(**settings)


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients in backward; its settings need no choice.

    Args:
        module: the model.
        process_group: the ranks that hold replicas, or a mesh of them.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh) -> None:
        config = SimpleNamespace(gradient_accumulation_fusion=False)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        super().__init__(config, settings, module, process_group=process_group, finish_in_backward=True)
