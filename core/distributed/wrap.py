"""`wrap_model`: the only place that chooses a wrapper."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

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

    A `TorchFullyShardedDataParallelConfig` means FSDP2; else ``no_shard``, ``optim`` and ``optim_grads`` mean buffers,
    and ``optim_grads_params`` means FSDP2 for now, which a warning says once.
    """
    if isinstance(ddp_config, TorchFullyShardedDataParallelConfig):
        return TorchFullyShardedDataParallel(config, ddp_config, module, process_group=process_group)
    if ddp_config.sharding_strategy == "optim_grads_params":
        say_that_fsdp2_stands_in()
        return TorchFullyShardedDataParallel(config, ddp_config, module, process_group=process_group)
    return DistributedDataParallel(config, ddp_config, module, process_group=process_group)


@functools.cache
def say_that_fsdp2_stands_in() -> None:
    """Warns, once, of what ``optim_grads_params`` means for now."""
    warnings.warn(
        "the sharding strategy 'optim_grads_params' has no form on our own buffers yet; PyTorch FSDP2 stands in, as a "
        "TorchFullyShardedDataParallelConfig would ask for without this warning",
        stacklevel=3,
    )
