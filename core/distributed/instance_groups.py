"""The process groups of hybrid sharding: within an optimizer instance, and across instances."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import parallel_state
from ..errors import ParallelConfigError
from ..process_groups_config import ProcessGroupCollection
from .distributed_data_parallel_config import DistributedDataParallelConfig
from .mesh_axes import whole_group

Ranks = dist.ProcessGroup | DeviceMesh
"""What a wrapper works over: a group, or a mesh of one axis or, for hybrid sharding, of ``(replicate, shard)``."""


def ranks_of(
    caller: str,
    ddp_config: DistributedDataParallelConfig,
    pg_collection: ProcessGroupCollection | None,
    process_group: Ranks | None,
) -> Ranks | None:
    """The ranks that hold replicas, of whichever was given; None where neither was.

    Of a collection it is `dp_cp`, or `dp` where that alone was set.

    Raises:
        ParallelConfigError: both were given, a group in the place of a collection, a collection without these, or one
            with several optimizer instances.
    """
    if pg_collection is None:
        return process_group
    if not isinstance(pg_collection, ProcessGroupCollection):
        raise ParallelConfigError(
            f"{caller}: pg_collection is a {type(pg_collection).__name__}; it takes a ProcessGroupCollection, and a "
            "group or a mesh goes to process_group"
        )
    if process_group is not None:
        raise ParallelConfigError(f"{caller}: pg_collection and process_group are both given; drop one")
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise ParallelConfigError(
            f"{caller}: num_distributed_optimizer_instances is {ddp_config.num_distributed_optimizer_instances} with "
            "a pg_collection; give a mesh (replicate, shard) as process_group, or the groups of core.parallel_state"
        )
    group = pg_collection.dp_cp or pg_collection.dp
    if group is None:
        raise ParallelConfigError(f"{caller}: pg_collection has neither dp_cp nor dp; set dp_cp, the replicas' ranks")
    return group


def resolve_instance_groups(
    ddp_config: DistributedDataParallelConfig, process_group: Ranks | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup | None]:
    """All replicas, those of this optimizer instance, and where there are several the same shard's owners in each.

    Raises:
        ParallelConfigError: a number of instances that does not divide the replicas, or for which no groups exist.
    """
    asked = ddp_config.num_distributed_optimizer_instances
    if isinstance(process_group, DeviceMesh):
        mesh = process_group
        check_instances_of_mesh(asked, mesh)
        whole = whole_group(mesh)
        is_hybrid = mesh.ndim == 2 and ddp_config.sharding_strategy != "no_shard"
        return (whole, whole, None) if not is_hybrid else (whole, mesh.get_group(1), mesh.get_group(0))
    if process_group is not None:
        if asked > 1:
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {asked} with a process_group given, which has one axis; "
                "drop one of the two"
            )
        return process_group, process_group, None
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if asked == 1:
        return whole, whole, None
    if whole.size() % asked:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances {asked} does not divide the data-parallel size {whole.size()}; "
            "choose a divisor of it"
        )
    part = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if whole.size() // part.size() != asked:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {asked}, but core.parallel_state was initialised with "
            f"{whole.size() // part.size()}; give both the same number"
        )
    return whole, part, parallel_state.get_inter_distributed_optimizer_instance_group()


def check_instances_of_mesh(asked: int, mesh: DeviceMesh) -> None:
    """A mesh says by itself how many optimizer instances there are; the config may say it too.

    Raises:
        ParallelConfigError: they say different things.
    """
    found = mesh.size(0) if mesh.ndim == 2 else 1
    if mesh.ndim > 2 or asked not in (1, found):
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {asked}, and the mesh given has the shape {tuple(mesh.shape)}; "
            "give one axis, or (replicate, shard) with as many replicas as instances"
        )
