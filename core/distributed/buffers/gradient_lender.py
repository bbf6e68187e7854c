"""Lends bucket memory to a layer, which computes a parameter's gradient in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .bucket_group import BucketGroup


class GradientLender:
    """``param.lend_gradient_memory``: returns memory for the parameter's gradient, or None.

    `core.tensor_parallel.weight_gradients` calls it in a layer's backward. A pickled parameter has None instead.
    """

    def __init__(self, group: BucketGroup, param: nn.Parameter) -> None:
        self._group, self._param = group, param

    def __call__(self) -> Tensor | None:
        return self._group.lend(self._param)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
