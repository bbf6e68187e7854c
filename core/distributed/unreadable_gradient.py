"""A tensor for ``param.grad`` that raises when it is read, for gradients that are sharded or in another dtype.

With None, `torch.nn.utils.clip_grad_norm_` and loops over gradients would silently skip the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ShardstackError

UNREADABLE = (
    "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank, or keeps it in "
    "another dtype; clip by OptimizerConfig(clip_grad=...) and step by get_megatron_optimizer, read this rank's part "
    "with wrapper.local_gradient(param), or use the sharding strategy 'no_shard', and no setting that keeps gradients "
    "in fp32"
)


def make_unreadable_gradient(param: nn.Parameter) -> Tensor:
    """Returns a tensor without memory that can be assigned to ``param.grad`` and that raises whenever it is used."""
    return _UnreadableGradient(param)


def is_unreadable(gradient: Any) -> bool:
    """Returns whether `make_unreadable_gradient` made it."""
    return type(gradient) is _UnreadableGradient


def take_added(gradient: Tensor) -> Tensor:
    """Returns what autograd has just added to an unreadable gradient, which does not hold it any longer."""
    added: Tensor = vars(gradient).pop("added")
    return added


class _UnreadableGradient(Tensor):
    added: Tensor
    """The gradient of a backward. Autograd's accumulation sets it, on its thread. The wrapper's hook, which autograd
    calls next, takes it away (`take_added`). It exists only between the two."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> _UnreadableGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardstackError(UNREADABLE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Autograd adds a new gradient to `param.grad` in C++. Keep it for the wrapper's hook, which comes next.
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and is_unreadable(args[0]):
            vars(args[0])["added"] = args[1]
            return args[0]
        raise ShardstackError(UNREADABLE)
