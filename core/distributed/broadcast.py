"""Makes replicas equal: what the group's first rank holds, or will draw its initial values from, sent to all of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .. import device
from ..transformer.module import Float16Module


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites tensors, in place, with those of the group's first rank; the order must agree on all ranks.

    Of a DTensor its local shard is sent: the group must then be one whose ranks hold the same shard. Tensors on the
    meta device have nothing to send.
    """
    if group.size() == 1:
        return
    source = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        if not tensor.is_meta:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            dist.broadcast(local, source, group=group)


def broadcast_init_seed(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives a model that is to be materialized the seed of the group's first rank, so that all draw alike."""
    owner = module.module if isinstance(module, Float16Module) else module
    seed = getattr(owner, "init_seed", None)
    if seed is not None:
        shared = torch.tensor(seed, dtype=torch.int64, device=device.current_device())
        broadcast_tensors([shared], group)
        owner.init_seed = int(shared)  # type: ignore[assignment]
