"""Selects the FSDP2 wrapper without Megatron-LM's flag, whose check refuses what this wrapper can do."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import ParallelConfigError

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
