"""Data parallelism: one interface, several wrappers, and the numbers do not change between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

from torch import nn

from ..base.errors import ConfigError
from ..base.megatron_names import absent_names
from ..base.module_protocol import unwrap_model
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel
from .distributed_data_parallel import DistributedDataParallel
from .distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from .finalize_model_grads import finalize_model_grads
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig, TorchFullyShardedDataParallelConfig
from .groups import Ranks
from .plan.settings import own_settings
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
    config: Any = None,
    ddp_config: DistributedDataParallelConfig | None = None,
    *,
    process_group: Ranks | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    sub_modules_to_wrap: Iterable[UnitChoice] | None = None,
    disable_bucketing: bool = False,
) -> _BaseDataParallel:
    """Wraps a model: ``wrap_model(net, ddp_config)``, or in Megatron-LM's order ``(net, config, ddp_config)``.

    The type of ``ddp_config`` and its sharding strategy choose the wrapper. A `TorchFullyShardedDataParallelConfig`
    means FSDP2; else ``no_shard``, ``optim`` and ``optim_grads`` mean `DistributedDataParallel`, and
    ``optim_grads_params`` means `FullyShardedDataParallel`. Without one the model is replicated.

    Args:
        config: the model's config. Left out, it is the module's own ``config`` if that has Megatron-LM's fields. Any
            object will do, as an absent field takes its default. What is read of it, and `describe` lists:
            ``bf16`` and ``fp16``, the dtype that parameters are cast to for computing; ``calculate_per_token_loss``,
            by which gradients are summed, not averaged; ``gradient_accumulation_fusion``;
            ``tensor_model_parallel_size``, ``context_parallel_size``, ``pipeline_model_parallel_size`` and
            ``expert_model_parallel_size``, which the groups have to match.
        ddp_config: the wrapper's settings.
        process_group: the ranks, or a mesh of them. By default those of `shardstack.parallel_state`, or where that is
            not initialised all ranks of ``torch.distributed``.
        pg_collection: the same in Megatron-LM's form.
        sub_modules_to_wrap: classes of units, or their names.
        disable_bucketing: reduce each buffer of gradients in one piece.

    Raises:
        ConfigError: `ddp_config` is no config of a wrapper.
        WrapError, ParallelConfigError, ParallelStateError: as the wrappers do.
    """
    if isinstance(config, DistributedDataParallelConfig) and not isinstance(ddp_config, DistributedDataParallelConfig):
        config, ddp_config = ddp_config, config
    if ddp_config is None:  # a config without settings of the wrapper is refused below
        config, ddp_config = None, DistributedDataParallelConfig() if config is None else config
    if config is None:
        own = getattr(unwrap_model(module), "config", None)
        config = own if hasattr(own, "calculate_per_token_loss") else None
    if isinstance(module, nn.Module) and is_dataclass(ddp_config) and not isinstance(ddp_config, type):
        ddp_config = own_settings(ddp_config)
    if not isinstance(module, nn.Module) or not isinstance(ddp_config, DistributedDataParallelConfig):
        raise ConfigError(
            f"wrap_model was given a {type(module).__name__} as the model and a {type(ddp_config).__name__} as the "
            "wrapper's settings; call wrap_model(net, FullyShardedDataParallelConfig()), for example"
        )
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
