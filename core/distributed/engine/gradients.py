"""The gradient of a parameter that an optimizer reads, and the tensor in ``param.grad`` where that cannot be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...base.parameters import local_part
from ..step_marks import mark_of


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `read_gradient`."""
    gradient = read_gradient(parameter)
    return None if gradient is None else local_part(gradient)


def read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient that the optimizer reads: ``main_grad`` where present, else ``grad``. None leaves it out.

    Under a wrapper ``grad`` counts: after `finish_grad_sync` it is the memory of ``main_grad``, or what the user has
    set it to since, also None. Where dtypes differ it is a tensor that cannot be read, in the place of ``main_grad``.
    """
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    is_shown = getattr(mark_of(parameter), "shows_gradients", False) and not is_unreadable(parameter.grad)
    return parameter.grad if gradient is None or is_shown else gradient


# ---- ``param.grad`` of gradients that are sharded, or in another dtype: a tensor that raises when it is read. With
# None, `torch.nn.utils.clip_grad_norm_` and loops over gradients would silently skip the parameter.

UNREADABLE = (
    "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank, or keeps it in "
    "another dtype; clip by OptimizerConfig(clip_grad=...) and step by get_megatron_optimizer, read this rank's part "
    "with wrapper.local_gradient(param), or use the sharding strategy 'no_shard', and no setting that keeps gradients "
    "in fp32"
)


def is_unreadable(gradient: Any) -> bool:
    """Returns whether a gradient is an `UnreadableGradient`."""
    return type(gradient) is UnreadableGradient


class UnreadableGradient(Tensor):
    """A tensor without memory, to be ``param.grad`` of `param`, that raises whenever it is used."""

    added: Tensor
    """The gradient of a backward. Autograd's accumulation sets it, on its thread. The wrapper's hook, which autograd
    calls next, takes it away. It exists only between the two."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> UnreadableGradient:
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
