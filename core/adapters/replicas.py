"""Replicas for code that was written for torch's DDP, which reads ``param.grad`` after backward and calls no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import current_backward
from ..distributed import DistributedDataParallel, DistributedDataParallelConfig

_NO_BACKWARD = -1


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients at the end of a backward, and leaves them in ``param.grad``.

    Any optimizer may read them there, and ``main_grad`` is the same memory. A backward that finds gradients adds to
    them; one after they were set to None (``zero_grad``) begins anew, as does one after a backward that raised. Inside
    `no_sync` they add up out of sight.

    Args:
        module: the model.
        process_group: the ranks that hold replicas, or a mesh of them.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh) -> None:
        config = SimpleNamespace(gradient_accumulation_fusion=False)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        super().__init__(config, settings, module, process_group=process_group)
        self._is_finished = False
        self._awaited = _NO_BACKWARD

    def _take_gradient(self, param: Tensor) -> None:
        backward = current_backward()
        if self._is_finished:
            self._begin_anew()
        elif self._awaited not in (_NO_BACKWARD, backward):  # it has raised on its way
            self._drop_gradients()
        if param.grad is not None and _is_same_memory(param.grad, param):
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        super()._take_gradient(param)
        if self._syncs_gradients and self._awaited != backward:
            self._awaited = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _begin_anew(self) -> None:
        """Opens the buckets again, with what ``param.grad`` still holds of the last backward."""
        self._is_finished = False
        self._next_to_leave = 0
        for group in self.bucket_groups:
            dropped = [p for p in group.bucket.params if p.grad is None or not _is_same_memory(p.grad, p)]
            if len(dropped) == len(group.bucket.params):
                group.clear_grads()
                continue
            group.has_reduced = False  # all ranks hold the same mean, which a second reduction leaves as it is
            for param in dropped:
                param.main_grad.zero_()  # type: ignore[attr-defined]

    def _drop_gradients(self) -> None:
        self._awaited, self._next_to_leave = _NO_BACKWARD, 0
        for group in self.bucket_groups:
            group.clear_grads()

    def _finish_backward(self) -> None:
        self._awaited = _NO_BACKWARD
        self.finish_grad_sync()

    def _finish_grad_sync(self, force_all_reduce: bool) -> None:
        super()._finish_grad_sync(force_all_reduce)
        self._is_finished = True
        for param in self._group_of:
            param.grad = param.main_grad  # type: ignore[attr-defined]

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        self._is_finished = False
        self._awaited = _NO_BACKWARD


def _is_same_memory(gradient: Tensor, param: Any) -> bool:
    main_grad = getattr(param, "main_grad", None)
    return main_grad is not None and gradient.data_ptr() == main_grad.data_ptr()
