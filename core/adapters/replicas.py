"""Replicas for code that was written for torch's DDP, which reads ``param.grad`` after backward and calls no more."""

from __future__ import annotations

from types import SimpleNamespace

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
        # The backward that will finish gradients at its end: set by the first gradient that it brings, cleared there.
        self._awaited = _NO_BACKWARD

    def _take_gradient(self, param: Tensor) -> None:
        backward = current_backward()
        if self._awaited not in (_NO_BACKWARD, backward):  # it has raised on its way
            self._drop_gradients()
        super()._take_gradient(param)
        if self._syncs_gradients and self._awaited != backward:
            self._awaited = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _drop_gradients(self) -> None:
        self._awaited, self._next_to_leave = _NO_BACKWARD, 0
        for group in self._bucket_groups:
            group.clear_grads()

    def _finish_backward(self) -> None:
        self._awaited = _NO_BACKWARD
        self.finish_grad_sync()

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        self._awaited = _NO_BACKWARD
