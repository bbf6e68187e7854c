"""Selects the FSDP2 wrapper: in the place of Megatron-LM's class of the same name, or without Megatron-LM's flag."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from megatron.core.distributed import torch_fully_sharded_data_parallel as stock_module
from torch import nn

from ...distributed import TorchFullyShardedDataParallelConfig
from ...errors import ParallelConfigError, ShardstackError
from ...text import choices
from .wrapper import TorchFullyShardedDataParallel, registered_settings

_STOCK = stock_module.TorchFullyShardedDataParallel
_CHOSEN = "_shardstack_chose_fsdp2"
"""An attribute of Megatron-LM's arguments: `with_fsdp2` has set ``use_torch_fsdp2``, not a flag."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_torch_fsdp2": ((False,), "with_fsdp2 takes the place of --use-torch-fsdp2; drop the flag"),
    "use_distributed_optimizer": ((False,), "FSDP2 shards the optimizer's state already; drop the flag"),
    "use_megatron_fsdp": ((False,), "one wrapper shards a model; drop the flag"),
    "ckpt_format": (
        ("torch_dist", "torch_dcp"),
        "other formats store each rank's tensors as they are, without their place in the whole; use torch_dist",
    ),
    "optimizer": (("adam", "sgd"), "others need whole matrices, and a rank has rows of them; use adam or sgd"),
}
"""By the name of an argument: the values that are supported, and why not the others."""


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
        for name, (supported, reason) in _REFUSED.items():
            value = getattr(arguments, name, supported[0])
            if value not in supported and not getattr(arguments, _CHOSEN, False):
                raise ParallelConfigError(f"--{name.replace('_', '-')} is {value!r} with with_fsdp2: {reason}")
        arguments.use_torch_fsdp2 = True
        setattr(arguments, _CHOSEN, True)
        return model_provider(*args, **kwargs)

    return provide
