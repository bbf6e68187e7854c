"""The settings that PyTorch FSDP2 has beyond those of every wrapper that shards parameters, and what holds a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from ..base.megatron_names import takes_megatron_fields
from .distributed_data_parallel_config import DistributedDataParallelConfig, shards_parameters
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig


@takes_megatron_fields
@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardedDataParallelConfig):
    """Settings of :class:`TorchFullyShardedDataParallel`. Giving one to `wrap_model` chooses that wrapper.

    Dtypes are torch's, or their names, as ``"bf16"`` or ``"float32"``.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    collectives: Literal["auto", "torch"] = "auto"
    """``auto``: as the backend does them best; under gloo ranks exchange pieces directly. ``torch``: FSDP2's own."""


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
