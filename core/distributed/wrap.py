"""`wrap_model`: the only place that chooses a wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..process_groups_config import ProcessGroupCollection
from ..warn import warn_once
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel import DistributedDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .groups import Ranks
from .plan import shards_parameters
from .plan.units import UnitChoice
from .torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from .torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig


def wrap_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    process_group: Ranks | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
    disable_bucketing: bool = False,
) -> _BaseDataParallel:
    """Wraps a model; the type of ``ddp_config`` and its sharding strategy choose the wrapper.

    A `TorchFullyShardedDataParallelConfig` means FSDP2; else ``no_shard``, ``optim`` and ``optim_grads`` mean flat
    buffers, and ``optim_grads_params`` means FSDP2 for now, with a warning.

    Args:
        process_group: the ranks, or a mesh of them; as in the wrappers.
        pg_collection: the same in Megatron-LM's form.
        sub_modules_to_wrap: classes of units, if the wrapper has units.
        disable_bucketing: as in the wrappers.
    """
    common: dict[str, Any] = {
        "process_group": process_group,
        "pg_collection": pg_collection,
        "disable_bucketing": disable_bucketing,
    }
    if not shards_parameters(ddp_config):
        return DistributedDataParallel(config, ddp_config, module, **common)
    if not isinstance(ddp_config, TorchFullyShardedDataParallelConfig):
        warn_that_fsdp2_is_used()
    return TorchFullyShardedDataParallel(config, ddp_config, module, sub_modules_to_wrap, **common)


def warn_that_fsdp2_is_used() -> None:
    """Warns once that ``optim_grads_params`` uses PyTorch FSDP2."""
    warn_once(
        "the sharding strategy 'optim_grads_params' has no form on our own buffers yet; PyTorch FSDP2 is used "
        "instead, as a TorchFullyShardedDataParallelConfig would ask for without this warning"
    )
