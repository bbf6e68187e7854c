"""What FSDP2 keeps to itself: the only file that reads, and sets, its private state; its tests pin what it reads.

Gradients that a sharded model holds whole, because `no_sync` kept them on this rank: FSDP2 reduces a unit's gradient
from the backward hook that produced it, and after a last micro-batch inside `no_sync`, or one that did not reach every
unit, whole gradients are left over; torch has no public way to reduce or to drop them. Gathers that were started
ahead of a use that never came. The ranks among which a unit stays gathered between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from .._torch_compat import fsdp_param_groups


def reduce_unsharded_gradients(root: nn.Module) -> None:
    """Reduces what is left over, by the same path as the end of a backward; every rank must call it."""
    if any(_has_unsharded_gradient(parameter) for parameter in _fsdp_parameters(root)):
        _state(root)._root_post_backward_final_callback()


def drop_unsharded_gradients(root: nn.Module) -> None:
    """Forgets what is left over, as between two steps of which the first was abandoned."""
    for parameter in _fsdp_parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def drop_pending_gathers(root: nn.Module) -> None:
    """Waits for all-gathers that were started for a unit which then was not used, and forgets what they brought.

    Else that unit's next use would take them, and compute with parameters from before the optimizer's step. FSDP2
    does so itself at the end of a backward, but no backward follows an evaluation.
    """
    for group in _param_groups(root):
        result, group._all_gather_result = group._all_gather_result, None
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()


def take_root(root: nn.Module) -> None:
    """Makes `root` what FSDP2 calls the root, which otherwise is the first module to run, and for good."""
    _state(root)._lazy_init()


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
        shard = dist.new_group(ranks[row].tolist(), use_local_synchronization=True)
        replicate = dist.new_group(ranks[:, column].tolist(), use_local_synchronization=True)
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=names)
        self._mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def apply_to(self, module: nn.Module) -> None:
        """Sets it for the unit of this module, which reshards after forward already."""
        for group in fsdp_param_groups(_state(module)):
            group.post_forward_mesh_info = self._mesh_info
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = self._mesh_info


def _has_unsharded_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    unsharded = getattr(parameter, "_unsharded_param", None)  # absent before the first all-gather
    return unsharded is not None and unsharded.grad is not None


def _fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    for group in _param_groups(root):
        yield from group.fsdp_params


def _param_groups(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from fsdp_param_groups(_state(module))


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]
