"""Chooses the engine that holds parameters and gradients, from the settings."""

from __future__ import annotations

from enum import Enum, auto

from .distributed_data_parallel_config import DistributedDataParallelConfig, shards_parameters
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
from .torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig


class Engine(Enum):
    """The engine that holds the parameters and gradients of a wrapped model."""

    FLAT_BUFFERS = auto()
    """Whole parameters on every rank, gradients in flat buffers: ``no_shard``, ``optim`` and ``optim_grads``."""
    FULLY_SHARDED = auto()
    """Parameters in flat buffers that ranks share, gathered a unit at a time: ``optim_grads_params``."""
    FSDP2 = auto()
    """PyTorch's ``fully_shard``."""


def engine_of(ddp_config: DistributedDataParallelConfig) -> Engine:
    """Returns the engine for the settings: FSDP2 by their type, the others by the sharding strategy."""
    if isinstance(ddp_config, TorchFullyShardedDataParallelConfig):
        return Engine.FSDP2
    return Engine.FULLY_SHARDED if ddp_config.shards_parameters else Engine.FLAT_BUFFERS


def config_class(use_torch_fsdp2: bool, sharding_strategy: str) -> type[DistributedDataParallelConfig]:
    """Returns the class of the settings of FSDP2, or of a strategy on flat buffers."""
    if use_torch_fsdp2:
        return TorchFullyShardedDataParallelConfig
    return FullyShardedDataParallelConfig if shards_parameters(sharding_strategy) else DistributedDataParallelConfig
