"""What ``param.grad`` is where gradients are sharded over flat buffers: something that says so to whoever reads it.

None would tell `torch.nn.utils.clip_grad_norm_` and loops over gradients that there is nothing to do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import ShardstackError


def make_unreadable_gradient(param: nn.Parameter) -> Tensor:
    """A tensor that can be assigned to ``param.grad``, has one element of memory, and raises whenever it is used."""
    one = torch.empty((1,) * param.ndim, dtype=param.dtype, device=param.device)
    return one.expand(param.shape).as_subclass(_UnreadableGradient)  # type: ignore[return-value]


def is_unreadable(gradient: Any) -> bool:
    """Whether `make_unreadable_gradient` made it."""
    return type(gradient) is _UnreadableGradient


class _UnreadableGradient(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardstackError(
            "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank; clip by "
            "OptimizerConfig(clip_grad=...), read this rank's part with wrapper.local_gradient(param), or use the "
            "sharding strategy 'no_shard'"
        )
