"""Rejects a plain model's state dict that is given to the `load_state_dict` of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError


def reject_plain_state_dicts(root: nn.Module) -> None:
    """Makes `load_state_dict` of a sharded model and its modules raise a clear error for plain tensors.

    Torch would raise an error about mixed tensors for every parameter, or with ``assign=True`` replace the shard by
    the whole tensor.
    """
    for module in root.modules():
        names = [name for name, value in module.named_parameters(recurse=False) if isinstance(value, DTensor)]
        if names:
            module.register_load_state_dict_pre_hook(_checker(names))


def _checker(names: list[str]) -> Callable[..., None]:
    def check(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name in names:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                raise CheckpointError(
                    f"load_state_dict was given {prefix + name} as a plain tensor of shape {list(value.shape)}, and "
                    "the module holds it sharded over ranks (a DTensor); nothing was loaded from it. Load whole or "
                    "sharded state dicts with core.dist_checkpointing.load_model_state_dict(module, state_dict)"
                )

    return check
