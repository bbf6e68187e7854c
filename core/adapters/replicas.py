"""Replicas for code that was written for torch's DDP, which reads ``param.grad`` after backward and calls no more."""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import DistributedDataParallel, DistributedDataParallelConfig


class Replicas(DistributedDataParallel):
    """`DistributedDataParallel` that finishes gradients in backward; its settings need no choice.

    Args:
        module: the model.
        process_group: the ranks that hold replicas, or a mesh of them.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh) -> None:
        config = SimpleNamespace(gradient_accumulation_fusion=False)
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        super().__init__(config, settings, module, process_group=process_group, finish_in_backward=True)
