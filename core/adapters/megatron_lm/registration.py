"""Puts this library's wrapper in the place of Megatron-LM's class of the same name."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

from megatron.core.distributed import torch_fully_sharded_data_parallel as stock_module

from ...distributed import TorchFullyShardedDataParallelConfig
from ...errors import ParallelConfigError, ShardstackError
from ...text import choices
from .wrapper import TorchFullyShardedDataParallel, registered_settings

_STOCK = stock_module.TorchFullyShardedDataParallel


def register(**settings: Any) -> None:
    """Makes ``--use-torch-fsdp2`` select this library's wrapper; importing `core.adapters.megatron_lm` calls it.

    The class is replaced in every module of Megatron-LM that has it, also in those that were imported before.

    Args:
        settings: fields of `core.distributed.TorchFullyShardedDataParallelConfig` for every wrapper from now on, as
            ``grad_reduce_in_fp32=True``: Megatron-LM gives its FSDP2 wrapper ``reshard_after_forward`` alone.

    Raises:
        ParallelConfigError: an unknown setting, or one that contradicts another.
        ShardstackError: a module outside of Megatron-LM, as a training script, imported Megatron-LM's class before.
    """
    known = {field.name for field in fields(TorchFullyShardedDataParallelConfig)}
    for name in settings.keys() - known:
        raise ParallelConfigError(f"register was given {name}, which is no setting of FSDP2; {choices(name, known)}")
    TorchFullyShardedDataParallelConfig(**settings)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    holders = [module for module in modules if module.__name__ != __name__ and _names_of_stock(module)]
    for module in holders:
        if not module.__name__.startswith("megatron."):
            raise ShardstackError(
                f"{module.__name__} imported Megatron-LM's TorchFullyShardedDataParallel before "
                "core.adapters.megatron_lm, and would go on using it; import core.adapters.megatron_lm first"
            )
    for module in holders:
        for name in _names_of_stock(module):
            setattr(module, name, TorchFullyShardedDataParallel)
    registered_settings.clear()
    registered_settings.update(settings)


def _names_of_stock(module: ModuleType) -> list[str]:
    return [name for name, value in list(vars(module).items()) if value is _STOCK]
