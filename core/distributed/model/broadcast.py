"""Makes replicas equal: broadcasts the tensors, or the seeds of initial values, of the group's first rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from ... import device
from ...comm.collectives import broadcast_by_backend
from ...local_parts import local_part
from ...transformer.module import root_seed


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors, in place, with those of the group's first rank; the order must be the same on all ranks.

    Sends the local shard of a DTensor: ranks of the group must have the same shard. Skips tensors on the meta device.
    Copies a tensor on another device to the one that this process computes on, so that all ranks send from the same
    kind of device.
    """
    if group.size() == 1:
        return
    for tensor in tensors:
        if not tensor.is_meta:
            local = local_part(tensor.detach())
            sent = local.to(device.current_device())
            broadcast_by_backend(sent, group, what="initial values")
            if sent is not local:
                local.copy_(sent)


def has_running_statistics(module: nn.Module) -> bool:
    """Returns whether a training forward changes buffers by its own batch, as that of BatchNorm does."""
    return any(getattr(submodule, "running_mean", None) is not None for submodule in module.modules())


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrites persistent buffers with those of the group's first rank, by one collective for each dtype."""
    if group.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                by_dtype[buffer.dtype].append(local_part(buffer))
    for buffers in by_dtype.values():
        sent = torch.cat([buffer.reshape(-1).to(device.current_device()) for buffer in buffers])
        broadcast_by_backend(sent, group, what="the model's buffers")
        for buffer, values in zip(buffers, sent.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def share_init_seeds(module: nn.Module, group: dist.ProcessGroup) -> int:
    """Replaces every module's `init_seed` by that of the group's first rank; returns the model's."""
    owners = [owner for owner in module.modules() if isinstance(getattr(owner, "init_seed", None), int)]
    seeds = [root_seed(module), *(owner.init_seed for owner in owners)]
    shared = torch.tensor(seeds, dtype=torch.int64, device=device.current_device())
    broadcast_tensors([shared], group)
    first, *others = shared.tolist()
    for owner, seed in zip(owners, others, strict=True):
        owner.init_seed = seed
    return int(first)
