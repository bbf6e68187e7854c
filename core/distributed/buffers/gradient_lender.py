"""Lends a layer memory to compute a parameter's gradient in, through an attribute of the parameter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .bucket_group import BucketGroup


class GradientLender:
    """``param.lend_gradient_memory``: asked by a layer for memory to compute the parameter's gradient in, or None.

    (`core.tensor_parallel.weight_gradients` calls it.) It belongs to this parameter: in a pickled one it is None.
    """

    def __init__(self, group: BucketGroup, param: nn.Parameter) -> None:
        self._group, self._param = group, param

    def __call__(self) -> Tensor | None:
        return self._group.lend(self._param)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
