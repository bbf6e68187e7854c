"""Puts the wrappers of this library in the place of Megatron-LM's, in every module that has them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from megatron.core import optimizer as stock_optimizer
from megatron.core.distributed import distributed_data_parallel as stock_ddp
from megatron.core.distributed import torch_fully_sharded_data_parallel as stock_fsdp2
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as stock_fsdp
from megatron.core.optimizer import muon as stock_muon
from torch import nn

from ...base.errors import ParallelConfigError, ShardstackError
from ...base.text import choices
from ...distributed import TorchFullyShardedDataParallelConfig
from ..bridge.translation import check_settings
from .settings import registered_settings
from .training_step import finalize_model_grads, get_megatron_optimizer, megatron_step
from .wrappers import DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel

_FSDP_NAMES = ("FullyShardedDataParallel", "FullyShardedDataParallelV1", "FullyShardedDataParallelV2")

REPLACED: dict[Any, Any] = {
    stock_ddp.DistributedDataParallel: DistributedDataParallel,
    stock_fsdp2.TorchFullyShardedDataParallel: TorchFullyShardedDataParallel,
    **{getattr(stock_fsdp, n): FullyShardedDataParallel for n in _FSDP_NAMES if hasattr(stock_fsdp, n)},
    **{
        stock: functools.partial(own, stock)
        for stock, own in (
            (megatron_step.finalize_model_grads, finalize_model_grads),
            (stock_optimizer.get_megatron_optimizer, get_megatron_optimizer),
            (stock_muon.get_megatron_muon_optimizer, get_megatron_optimizer),
        )
    },
}
"""The class or function of this adapter in the place of each of Megatron-LM's. Megatron-FSDP has one class up to 0.19,
and from 0.20 two of them and a function."""


def register(**settings: Any) -> None:
    """Puts this library's wrappers in the place of Megatron-LM's. Importing `core.adapters.megatron_lm` calls it.

    The classes are replaced in every module of Megatron-LM that has them, also in those that were imported before.

    Args:
        settings: fields of `core.distributed.TorchFullyShardedDataParallelConfig` for every FSDP2 wrapper from now
            on, as ``grad_reduce_in_fp32=True``: Megatron-LM gives its own ``reshard_after_forward`` alone.

    Raises:
        ParallelConfigError: an unknown setting, or one that contradicts another.
        ShardstackError: a module outside of Megatron-LM, as a training script, imported one of the classes before.
    """
    allowed = {field.name for field in fields(TorchFullyShardedDataParallelConfig)}
    for name in settings.keys() - allowed:
        raise ParallelConfigError(f"register was given {name}, which is no setting of FSDP2; {choices(name, allowed)}")
    TorchFullyShardedDataParallelConfig(**settings)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    holders = [
        (module, name, own)
        for module in modules
        for name, value in list(vars(module).items())
        for stock, own in REPLACED.items()
        if value is stock  # what else a module has is not looked at: some warn then
    ]
    for module, name, _ in holders:
        if not module.__name__.startswith("megatron."):
            raise ShardstackError(
                f"{module.__name__} imported Megatron-LM's {name} before core.adapters.megatron_lm, and would go on "
                "using it; import core.adapters.megatron_lm first"
            )
    for module, name, own in holders:
        setattr(module, name, own)
    registered_settings.clear()
    registered_settings.update(settings)


def with_fsdp2(model_provider: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a model provider for ``pretrain`` that selects the FSDP2 wrapper when it builds the model.

    Megatron-LM checks its flags before that: without ``--use-torch-fsdp2`` it demands neither untied embeddings nor
    another precision than fp16, nor a value of ``CUDA_DEVICE_MAX_CONNECTIONS``. What cannot work is refused here.

    Raises:
        ParallelConfigError: by the provider, for an argument that FSDP2 cannot honour.
    """

    @functools.wraps(model_provider)
    def provide(*args: Any, **kwargs: Any) -> nn.Module:
        # Imported here: `core.adapters.megatron_lm` is imported before `megatron.training`.
        arguments = importlib.import_module("megatron.training.global_vars").get_args()
        check_settings(arguments, "megatron_lm arguments", where=" with with_fsdp2")
        arguments.use_torch_fsdp2 = True
        return model_provider(*args, **kwargs)

    return provide
