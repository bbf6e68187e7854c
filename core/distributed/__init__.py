"""Data parallelism: one interface, several wrappers, and the numbers do not change between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..base.megatron_names import absent_names
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel import DistributedDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .finalize_model_grads import finalize_model_grads
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig
from .groups import Ranks
from .plan.units import UnitChoice
from .torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FullyShardedDataParallel",
    "FullyShardedDataParallelConfig",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "_BaseDataParallel",
    "finalize_model_grads",
    "wrap_model",
]


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
    """Wraps a model. The type of ``ddp_config`` and its sharding strategy choose the wrapper.

    A `TorchFullyShardedDataParallelConfig` means FSDP2; else ``no_shard``, ``optim`` and ``optim_grads`` mean
    `DistributedDataParallel`, and ``optim_grads_params`` means `FullyShardedDataParallel`.

    Args:
        process_group: the ranks, or a mesh of them; as in the wrappers.
        pg_collection: the same in Megatron-LM's form.
        sub_modules_to_wrap: classes of units, or their names.
        disable_bucketing: reduce each buffer of gradients in one piece.
    """
    return _WRAPPERS[ddp_config.engine](
        config,
        ddp_config,
        module,
        sub_modules_to_wrap=sub_modules_to_wrap,
        process_group=process_group,
        pg_collection=pg_collection,
        disable_bucketing=disable_bucketing,
    )


# One wrapper for each engine.
_WRAPPERS: dict[EngineKind, Callable[..., _BaseDataParallel]] = {
    wrapper.engine_kind: wrapper
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel)
}


__getattr__ = absent_names(__name__)
