"""Names of sharding strategies, as users of a trainer choose them, and the config of each one's wrapper."""

from __future__ import annotations

from typing import Any

from ..distributed import DistributedDataParallelConfig, engine
from ..distributed.distributed_data_parallel_config import SHARDING_STRATEGIES

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
