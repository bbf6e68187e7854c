"""The settings that PyTorch FSDP2 has beyond those of every wrapper that shards parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base.megatron_names import takes_megatron_fields
from .distributed_data_parallel_config import DistributedDataParallelConfig, Engine, shards_parameters
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

    @property
    def engine(self) -> Engine:
        return Engine.FSDP2


def config_class(use_torch_fsdp2: bool, sharding_strategy: str) -> type[DistributedDataParallelConfig]:
    """Returns the class of the settings of FSDP2, or of a strategy on flat buffers."""
    if use_torch_fsdp2:
        return TorchFullyShardedDataParallelConfig
    return FullyShardedDataParallelConfig if shards_parameters(sharding_strategy) else DistributedDataParallelConfig
