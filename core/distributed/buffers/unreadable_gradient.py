"""A tensor for ``param.grad`` that raises when it is read, for gradients that are sharded in flat buffers.

With None, `torch.nn.utils.clip_grad_norm_` and loops over gradients would silently skip the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ShardstackError

_MESSAGE = (
    "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank; clip by "
    "OptimizerConfig(clip_grad=...), read this rank's part with wrapper.local_gradient(param), or use the sharding "
    "strategy 'no_shard'"
)


def make_unreadable_gradient(param: nn.Parameter) -> Tensor:
    """Returns a tensor without memory that can be assigned to ``param.grad`` and that raises whenever it is used."""
    return _UnreadableGradient(param)


def is_unreadable(gradient: Any) -> bool:
    """Returns whether `make_unreadable_gradient` made it."""
    return type(gradient) is _UnreadableGradient


class _UnreadableGradient(Tensor):
    @staticmethod
    def __new__(cls, param: nn.Parameter) -> _UnreadableGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardstackError(_MESSAGE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Autograd adds a new gradient to `param.grad` in C++. Drop the sum: the wrapper's hook notices the backward.
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and is_unreadable(args[0]):
            return args[0]
        raise ShardstackError(_MESSAGE)
