"""What code between steps sees and may change: parameters where they were put, and gradients in ``param.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...base.errors import ShardstackError, WrapError
from ..model.unfit_models import reject_changed
from ..parameter_owner import is_unreadable, make_unreadable_gradient
from .bucket import Bucket


class ParamPlacement:
    """Remembers the memory of each parameter at wrapping, and compares it later.

    Args:
        model: the model inside the wrapper.
        params: names and parameters of the buffers.
    """

    def __init__(self, model: nn.Module, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        # Fixed. Its modules are asked in each check whether they still hold the parameters.
        self._model = model
        # Name of each, and its address and dtype. `note_moved` replaces those of parameters that an engine has moved.
        self._names: dict[nn.Parameter, str] = {}
        self._places: dict[nn.Parameter, tuple[int, torch.dtype]] = {}
        self.note_moved(params)
        # Whether an optimizer checks before each of its steps, so that one check a step is enough. Its first
        # `check_step` sets it; never cleared. Main thread only.
        self._is_checked_by_optimizer = False

    def note_moved(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Remembers where the engine has moved parameters to."""
        for name, param in params:
            self._names[param], self._places[param] = name, (param.data_ptr(), param.dtype)

    def check_unless_optimizer_does(self) -> None:
        """Checks when gradients are finished and updated parameters gathered, unless an optimizer does."""
        if not self._is_checked_by_optimizer:
            self.check()

    def check_step(self) -> None:
        """Checks before an optimizer steps."""
        self.check()
        self._is_checked_by_optimizer = True

    def check(self) -> None:
        """Compares the model's parameters with those at wrapping.

        Raises:
            WrapError: a parameter was moved, replaced, added, removed or made trainable since.
        """
        reject_changed(self._model, self._names)
        for param in self._model.parameters():
            if param in self._places and self._places[param] != (param.data_ptr(), param.dtype):
                raise WrapError(
                    f"the storage of parameter {self._names[param]} was replaced after the model was wrapped (a move "
                    "to another device or dtype, or a load with assign=True); wrap it afterwards, or load in place"
                )


class ShownGradients:
    """Sets ``param.grad`` of the parameters of flat buffers, from `finish_grad_sync` to the optimizer's step.

    A whole gradient is shown as a tensor that shares the memory of ``main_grad``. If gradients are sharded, or in
    another dtype than the parameter, ``param.grad`` is a tensor that raises when it is read. None is what users set.

    Args:
        bucket_of: the bucket of each parameter.
        is_sharded: whether a rank keeps only a shard of each gradient.
    """

    def __init__(self, bucket_of: Mapping[nn.Parameter, Bucket], is_sharded: bool) -> None:
        # Both fixed. Buckets own the gradients that are shown.
        self._bucket_of, self._is_sharded = bucket_of, is_sharded
        # After a step with sharded gradients: the parameters with a gradient, whose ``grad`` is hidden, so that code
        # between steps may convert or copy them. `hide_after_step` sets it, `show` clears it to None.
        self._stepped: set[nn.Parameter] | None = None
        # The tensor for each parameter that raises when it is read; without memory. Each step shows the same one.
        self._unreadable = {param: make_unreadable_gradient(param) for param in bucket_of}

    def take_written(self) -> None:
        """Replaces this rank's gradients by those that the user has assigned to ``param.grad``.

        Raises:
            ShardstackError: a gradient of the bucket has been reduced already, or is a part of a tree.
        """
        for param, bucket in self._bucket_of.items():
            if param.grad is not None and not shows_main_grad(param):
                _check_may_replace(bucket, bucket.slot_of(param).name)
                bucket.slot_of(param).replace(param.grad)
            param.grad = None

    def show(self) -> None:
        """Shows reduced gradients, and None for a frozen parameter without a gradient."""
        self._stepped = None
        for param, bucket in self._bucket_of.items():
            slot = bucket.slot_of(param)
            if not slot.has_gradient:
                param.grad = param.main_grad = None  # type: ignore[attr-defined]
                continue
            is_readable = not self._is_sharded and slot.main_grad_dtype == param.dtype
            param.grad = param.main_grad if is_readable else self._unreadable[param]  # type: ignore[attr-defined]

    def hide_after_step(self) -> None:
        """Clears ``param.grad`` after a step, if gradients are sharded."""
        if self._is_sharded and self._stepped is None:
            self._stepped = {param for param in self._bucket_of if param.grad is not None}
            for param in self._stepped:
                param.grad = None

    def has_gradient(self, param: nn.Parameter) -> bool:
        """Returns whether a step reads a gradient of the parameter, which the user has not set to None."""
        return param.grad is not None if self._stepped is None else param in self._stepped

    def find_written(self) -> nn.Parameter | None:
        """Returns a parameter whose ``grad`` the user has assigned although the optimizer reads a shard, or None."""
        if not self._is_sharded:
            return None
        return next((p for p in self._bucket_of if not (p.grad is None or is_unreadable(p.grad))), None)


def _check_may_replace(bucket: Bucket, name: str) -> None:
    if bucket.tree is None and not bucket.has_reduced:
        return
    when, remedy = "a part of the step's gradients had been reduced", ", or switch overlap_grad_reduce off"
    if bucket.tree is not None:
        when, remedy = "reproducible_across_ranks has micro-batches still to be added", ""
    raise ShardstackError(
        f"parameter {name} was given a .grad before finalize_model_grads, when {when}; set it after "
        f"finalize_model_grads{remedy}"
    )


def shows_main_grad(param: Any) -> bool:
    """Returns whether ``param.grad`` is still what `ShownGradients.show` has set it to."""
    grad = param.grad
    return grad is not None and (is_unreadable(grad) or grad is getattr(param, "main_grad", None))
