"""`wrap_model`: the only place that chooses a wrapper."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import ParallelConfigError
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel import DistributedDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from .torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig


def wrap_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> _BaseDataParallel:
    """Wraps a model as its settings ask: by the type of ``ddp_config``, then by its sharding strategy.

    A `TorchFullyShardedDataParallelConfig` means FSDP2, and so does the strategy ``optim_grads_params``; ``no_shard``
    means replicas.

    Raises:
        ParallelConfigError: a strategy that no wrapper here has.
    """
    strategy = ddp_config.sharding_strategy
    if isinstance(ddp_config, TorchFullyShardedDataParallelConfig) or strategy == "optim_grads_params":
        return TorchFullyShardedDataParallel(config, ddp_config, module, process_group=process_group)
    if strategy == "no_shard":
        return DistributedDataParallel(config, ddp_config, module, process_group=process_group)
    raise ParallelConfigError(
        f"the sharding strategy {strategy!r} has no wrapper yet; use 'no_shard', or 'optim_grads_params' for FSDP2"
    )
