"""Keeps parameters whole among a part of the ranks between forward and backward.

Relies on what `fully_shard` sets for resharding to a number of ranks: ``post_forward_mesh_info`` of the group
and of each parameter, and the two sizes that follow from it. Without these fields a unit would reshard to its full
group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from ...._torch_compat import fsdp_param_groups
from ...groups import subgroup
from .states import param_groups, state_of


class PartialReshard:
    """Lets units keep each parameter whole among `size` neighbours of the ranks `shard_group` after their forward.

    Torch makes new process groups for every unit that is given such a number, named so that groups of other
    tensor-parallel ranks would collide with them; here all units of a model share two.

    Args:
        size: a divisor of the size of `shard_group`, neither 1 nor all.
        device_type: of the mesh.
    """

    def __init__(self, shard_group: dist.ProcessGroup, size: int, device_type: str) -> None:
        ranks = torch.tensor(dist.get_process_group_ranks(shard_group)).view(-1, size)
        row, column = divmod(shard_group.rank(), size)
        shard = subgroup(shard_group, range(row * size, (row + 1) * size))
        replicate = subgroup(shard_group, range(column, shard_group.size(), size))
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=names)
        self._mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def apply_to(self, module: nn.Module) -> None:
        """Sets it for the unit of this module, which reshards after forward already."""
        for group in fsdp_param_groups(state_of(module)):
            group.post_forward_mesh_info = self._mesh_info
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = self._mesh_info
                size = parameter._orig_size
                chunks = torch.empty(size, device="meta").chunk(self._mesh_info.shard_mesh_size)
                rank = self._mesh_info.shard_mesh_rank
                own = chunks[rank].shape if rank < len(chunks) else torch.Size([0, *size[1:]])
                parameter.sharded_post_forward_size = own
                parameter.contiguous_sharded_post_forward_stride = torch.empty(own, device="meta").stride()


def free_partial_shards(root: nn.Module) -> None:
    """Frees what `PartialReshard` keeps after a forward, where the unit went back to its shard without a backward."""
    for group in param_groups(root):
        if group.is_sharded:
            for parameter in group.fsdp_params:
                parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None
