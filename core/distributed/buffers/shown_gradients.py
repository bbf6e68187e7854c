"""Shows reduced gradients in ``param.grad``, where users and torch's optimizers look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..parameter_owner import set_gradient_shared
from ..unreadable_gradient import is_unreadable, make_unreadable_gradient
from .bucket_group import BucketGroup


class ShownGradients:
    """Sets ``param.grad`` of the parameters of flat buffers, from `finish_grad_sync` to the optimizer's step.

    A whole gradient is shown as a tensor that shares the memory of ``main_grad``. If gradients are sharded, or in
    another dtype than the parameter, ``param.grad`` is a tensor that raises when it is read. None is what users set.

    Args:
        group_of: the bucket of each parameter.
        is_sharded: whether a rank keeps only a shard of each gradient.
    """

    def __init__(self, group_of: Mapping[nn.Parameter, BucketGroup], is_sharded: bool) -> None:
        self._group_of, self._is_sharded = group_of, is_sharded
        # The tensor for each parameter that raises when it is read; without memory. Made when it is first shown, and
        # never removed: each step shows the same one.
        self._unreadable: dict[nn.Parameter, Tensor] = {}

    def take_written(self) -> None:
        """Replaces this rank's gradients by those that the user has assigned to ``param.grad``."""
        for param, group in self._group_of.items():
            written = None if is_unreadable(param.grad) else param.grad
            if written is not None and not group.bucket.slot_of(param).is_memory_of(written):
                group.replace_gradient(param, written)
            param.grad = None

    def show(self) -> None:
        """Shows reduced gradients; None for a frozen parameter without a gradient."""
        for param, group in self._group_of.items():
            slot = group.bucket.slot_of(param)
            if not slot.has_gradient:
                param.grad = param.main_grad = None  # type: ignore[attr-defined]
                continue
            is_readable = not self._is_sharded and slot.main_grad_dtype == param.dtype
            param.grad = param.main_grad if is_readable else self._unreadable_gradient(param)  # type: ignore[attr-defined]
            set_gradient_shared(param, not self._is_sharded)

    def find_written(self) -> nn.Parameter | None:
        """Returns a parameter whose ``grad`` the user has assigned although the optimizer reads a shard, or None."""
        if not self._is_sharded:
            return None
        return next((p for p in self._group_of if not (p.grad is None or is_unreadable(p.grad))), None)

    def _unreadable_gradient(self, param: nn.Parameter) -> Tensor:
        if param not in self._unreadable:
            self._unreadable[param] = make_unreadable_gradient(param)
        return self._unreadable[param]


def shows_main_grad(param: Any) -> bool:
    """Returns whether ``param.grad`` is still what `ShownGradients.show` has set it to."""
    grad, main_grad = param.grad, getattr(param, "main_grad", None)
    if grad is None or is_unreadable(grad):
        return grad is not None
    return main_grad is not None and grad.data_ptr() == main_grad.data_ptr()
