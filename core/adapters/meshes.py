"""The data-parallel mesh of an adapter: all ranks, or a hybrid of machines."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import device, parallel_state
from ..errors import ParallelConfigError
from .mesh_axes import mesh_axes


def data_parallel_mesh(device_mesh: DeviceMesh | None, *, hybrid: bool) -> DeviceMesh:
    """Returns the mesh that a model is sharded over.

    Args:
        device_mesh: the user's, whose axes are found by name; else that of `core.parallel_state` where it is
            initialised; else all ranks, by ``LOCAL_WORLD_SIZE`` in a hybrid.
        hybrid: two axes, ``(replicate, shard)``; otherwise one.

    Raises:
        ParallelConfigError: ranks that ``LOCAL_WORLD_SIZE`` does not divide, or a mesh without axes for it.
    """
    device.init_process_group()
    if device_mesh is None and parallel_state.model_parallel_is_initialized():
        data = parallel_state.get_data_parallel_mesh()
    elif device_mesh is not None:
        data = mesh_axes(device_mesh).data
    elif hybrid:
        return _by_machines()
    else:
        return init_device_mesh(device.device_type(), (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    if hybrid and data.ndim == 1:
        return _by_machines_within(data)
    return data._flatten() if data.ndim == 2 and not hybrid else data


def fully_replicated(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the same ranks, each with a whole copy: the mesh of a hybrid whose shards have one rank each."""
    return _of_two_axes(mesh, 1)


def _by_machines() -> DeviceMesh:
    world = dist.get_world_size()
    local = _local_world_size(world)
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(device.device_type(), (world // local, local), mesh_dim_names=names)


def _by_machines_within(mesh: DeviceMesh) -> DeviceMesh:
    """Splits one axis in two where its ranks are those of whole machines."""
    return _of_two_axes(mesh, _local_world_size(mesh.size()))


def _of_two_axes(mesh: DeviceMesh, shard_size: int) -> DeviceMesh:
    if mesh.size() != dist.get_world_size():  # new groups are made by all processes, in one order
        raise ParallelConfigError(
            f"the mesh has {mesh.size()} data-parallel ranks of {dist.get_world_size()} in one axis; give it two, "
            "dp_replicate and dp_shard, for a hybrid or for replicas in mixed precision"
        )
    ranks = mesh.mesh.reshape(-1, shard_size)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def _local_world_size(world: int) -> int:
    asked = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    if not asked.isdecimal() or not 0 < int(asked) <= world or world % int(asked):
        raise ParallelConfigError(
            f"LOCAL_WORLD_SIZE is {asked!r}, which does not divide the {world} data-parallel ranks, so that they "
            "cannot be sharded within machines; set it to the ranks of a machine, give a device_mesh, or choose a "
            "strategy that is not hybrid"
        )
    return int(asked)
