"""Finds the process groups of a wrapper, once: all replicas, and for hybrid sharding the groups of both axes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import process_groups
from ..base import device
from ..base._torch_compat import named_group
from ..base.errors import ParallelConfigError, ParallelStateError
from ..comm.collectives import all_reduce_by_backend
from ..process_groups import ParallelGroups
from ..process_groups_config import ProcessGroupCollection, groups_in_effect

Ranks = dist.ProcessGroup | DeviceMesh
"""The ranks of a wrapper: a group, or a mesh of one axis or, for hybrid sharding, of ``(replicate, shard)``."""


@dataclass(frozen=True)
class DataParallelGroups:
    """The ranks with replicas of a model, and for hybrid sharding the groups of both axes."""

    whole: dist.ProcessGroup
    """All ranks: data parallel times context parallel."""

    shard: dist.ProcessGroup
    """The ranks of this optimizer instance, which shard parameters, gradients or optimizer state."""

    replicate: dist.ProcessGroup | None = None
    """The ranks with the same shard, one per optimizer instance. None with one instance."""

    given_mesh: DeviceMesh | None = None
    """The mesh that the groups come from, if any. Else `mesh` makes one."""

    experts: DataParallelGroups | None = None
    """The ranks with replicas of the same experts. None where these are the ranks above."""

    replicated: DataParallelGroups | None = None
    """The ranks above, each of which has parameters left out of sharding alone. None where there are none."""

    num_dense_replicas: int | None = None
    """In the groups of experts: the number of ranks in `whole` of other parameters."""

    model: ProcessGroupCollection = field(default_factory=ProcessGroupCollection, compare=False, repr=False)
    """The ranks that hold other parts of the model, such as `tp`, `pp` and `embd`. None where this rank is alone."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh ``(shard,)``, or for hybrid sharding ``(replicate, shard)``."""
        if self.given_mesh is not None:
            return self.given_mesh
        return DeviceMesh.from_group(self.whole, device.device_type(), mesh_dim_names=("dp_cp",))

    @property
    def num_replicas(self) -> int:
        """Number of ranks with the same shard."""
        return 1 if self.replicate is None else self.replicate.size()

    @property
    def divisor(self) -> int:
        """What gradients that are summed over `whole` are divided by. An expert's gradient has the tokens of all
        expert-parallel ranks already, so that its sum is one over as many ranks as that of other parameters."""
        return self.num_dense_replicas or self.whole.size()

    def of(self, parameter: torch.Tensor) -> DataParallelGroups:
        """Returns the groups of a parameter."""
        return self.of_kind(kind_of(parameter))

    def of_kind(self, kind: ParameterKind) -> DataParallelGroups:
        """Returns the groups of a kind of parameters: others for experts, and for replicated ones."""
        return {"expert": self.experts, "replicated": self.replicated}.get(kind) or self

    def with_replicated(self) -> DataParallelGroups:
        """Adds the groups of parameters that settings leave out of sharding."""
        return replace(self, replicated=DataParallelGroups(self.whole, _lone_group(), replicate=self.whole))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> DataParallelGroups:
        """Returns the groups of a mesh of one axis, or of ``(replicate, shard)``."""
        replicate = mesh.get_group(0) if mesh.ndim == 2 else None
        return cls(whole_group(mesh), mesh.get_group(-1), replicate, given_mesh=mesh)


ParameterKind = Literal["dense", "expert", "replicated", "ignored"]
"""Decides the ranks that share a parameter. An expert has Megatron-LM's mark ``allreduce=False``: its gradient belongs
to the experts' data-parallel group. The last two are what settings of a wrapper leave out."""


def kind_of(parameter: torch.Tensor) -> ParameterKind:
    """Returns the kind of a parameter, by its marks."""
    left_out: ParameterKind | None = getattr(parameter, LEFT_OUT, None)
    return left_out or ("dense" if getattr(parameter, "allreduce", True) else "expert")


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter has Megatron-LM's mark of experts, and is not left out."""
    return kind_of(parameter) == "expert"


def is_summed_later(parameter: torch.Tensor, stages: dist.ProcessGroup | None) -> bool:
    """Returns whether `finalize_model_grads` sums a reduced gradient over another axis: sequence-parallel ranks, or
    `stages`, the first and the last pipeline stage, which share the weight."""
    is_shared = getattr(parameter, "shared_embedding", False) and stages is not None and stages.size() > 1
    return is_shared or getattr(parameter, "sequence_parallel", False)


def managed_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields each parameter once, under its first name, without those that settings ignore."""
    return ((name, p) for name, p in module.named_parameters() if getattr(p, LEFT_OUT, None) != "ignored")


LEFT_OUT = "left_out_of_sharding"
"""An attribute of a parameter: its kind, if settings leave it out. `leave_out` sets it when a model is wrapped."""


def find_groups(
    caller: str,
    num_instances: int,
    process_group: Ranks | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    config: Any = None,
) -> DataParallelGroups:
    """Returns the groups given to a wrapper, by default those of `shardstack.parallel_state`, or else the default
    group.

    Args:
        caller: name of the function that the user called, for messages.
        num_instances: optimizer instances, ``num_distributed_optimizer_instances``.
        pg_collection: any object with groups by Megatron-LM's names. Its `dp_cp`, or else its `dp`, is used as
            `process_group`, its `expt_dp` for experts, and the rest as `model`.
        config: the model's config. Where it asks for model parallelism, the default group is not taken.

    Raises:
        ParallelConfigError: `process_group` and `pg_collection` are both given or of the wrong type; or the number of
            instances does not match the groups, or does not divide the ranks.
        ParallelStateError: there are no groups: ``torch.distributed`` is not initialised, or
            `shardstack.parallel_state` is not for a model that is split.
    """
    if process_group is None and pg_collection is None and process_groups.groups_or_none() is None:
        process_group = _default_ranks(caller, num_instances, config)
    if pg_collection is not None:
        pg_collection = ProcessGroupCollection.of(pg_collection, caller)
    replicas = _find_replicas(caller, num_instances, process_group, pg_collection)
    return replace(replicas, model=groups_in_effect(pg_collection))


def _find_replicas(
    caller: str, num_instances: int, process_group: Ranks | None, pg_collection: ProcessGroupCollection | None
) -> DataParallelGroups:
    experts = None
    if pg_collection is not None:
        process_group = _group_of_collection(caller, num_instances, process_group, pg_collection)
        if (replicas := pg_collection.expt_dp) is not None and replicas is not process_group:
            experts = DataParallelGroups(replicas, replicas, num_dense_replicas=process_group.size())
    if isinstance(process_group, DeviceMesh):
        num_replicas = process_group.size(0) if process_group.ndim == 2 else 1
        if process_group.ndim > 2 or num_instances not in (1, num_replicas):
            raise ParallelConfigError(
                f"num_distributed_optimizer_instances is {num_instances}, and the mesh given has the shape "
                f"{tuple(process_group.shape)}; give one axis, or (replicate, shard) with as many replicas as "
                "instances"
            )
        return DataParallelGroups.of_mesh(process_group)
    if process_group is None:
        return _initialized_groups(num_instances)
    if num_instances > 1:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {num_instances} with a process_group given, which has one axis; "
            "drop one of the two"
        )
    return DataParallelGroups(process_group, process_group, experts=experts)


def subgroup(group: dist.ProcessGroup, members: Sequence[int]) -> dist.ProcessGroup:
    """Makes a group of some members of `group`, this rank among them, with its timeout.

    Every rank of `group` calls it, each with its own members.
    """
    backend = group._get_backend(torch.device(device.device_type()))
    ranks = dist.get_process_group_ranks(group)
    number = torch.tensor(_next_number, device=device.current_device())
    all_reduce_by_backend(number, group, what="the number of process groups", op=dist.ReduceOp.MAX)
    # torch's ``fake`` backend has no options, and its collectives nothing to wait for
    timeout: timedelta | None = backend.options._timeout if backend.options is not None else None
    return _numbered_group(int(number), [ranks[member] for member in members], timeout)


def _numbered_group(number: int, ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Makes a group of ranks that agree on a number, which is at least the `_next_number` of each of them."""
    global _next_number
    _next_number = number + 1
    return named_group(f"shardstack-{min(ranks)}-{number}", ranks, timeout)


_next_number = 0
"""For names of groups. No group of this rank has had it or a larger one. `_numbered_group` raises it."""


def neighbour_groups(group: dist.ProcessGroup, sizes: Iterable[int | None]) -> Mapping[int | None, dist.ProcessGroup]:
    """Makes this rank's group of neighbours in `group` for each size, None apart. Every rank of `group` calls it."""
    groups = dict[int | None, dist.ProcessGroup]()
    for size in sorted({size for size in sizes if size is not None}):
        first = group.rank() // size * size
        groups[size] = subgroup(group, range(first, first + size))
    return groups


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a second group of the same ranks, made once for each group. All of its ranks call it.

    Collectives of one group do not wait for those of the other.
    """
    twin = _twins.get(group)
    if twin is None or _is_destroyed(twin):
        twin = _twins[group] = subgroup(group, range(group.size()))
    return twin


def _lone_group() -> dist.ProcessGroup:
    """Returns a group of this rank alone, made once."""
    world = dist.distributed_c10d._get_default_group()
    group = _lone_groups.get(world)
    if group is None or _is_destroyed(group):
        group = _lone_groups[world] = _numbered_group(_next_number, [dist.get_rank()])
    return group


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The second group of each group. `twin_group` adds and replaces entries. An entry is dropped when its first group is
freed."""

_lone_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The group of this rank alone, by the default group. `_lone_group` adds entries. They are dropped as those above."""


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the group of all ranks of a mesh of one axis or several."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _group_of_collection(
    caller: str, num_instances: int, process_group: Ranks | None, pg_collection: ProcessGroupCollection
) -> dist.ProcessGroup:
    if process_group is not None:
        raise ParallelConfigError(f"{caller}: pg_collection and process_group are both given; drop one")
    if num_instances > 1:
        raise ParallelConfigError(
            f"{caller}: num_distributed_optimizer_instances is {num_instances} with a pg_collection; give a mesh "
            "(replicate, shard) as process_group, or the groups of shardstack.parallel_state"
        )
    group = pg_collection.dp_cp or pg_collection.dp
    if group is None:
        raise ParallelConfigError(f"{caller}: pg_collection has neither dp_cp nor dp; set dp_cp, the replicas' ranks")
    return group


def _default_ranks(caller: str, num_instances: int, config: Any) -> Ranks:
    """Returns all ranks of ``torch.distributed``: its default group, or a mesh with a row for each instance."""
    for name in SPLITS:
        if (getattr(config, name, None) or 1) > 1:
            raise ParallelStateError(
                f"{caller} found no groups, and config.{name} is {getattr(config, name)}; call "
                "shardstack.parallel_state.initialize_model_parallel() first, or give process_group, the ranks with "
                "replicas"
            )
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelStateError(
            f"{caller} found no ranks: torch.distributed is not initialised; call "
            "shardstack.rendezvous.default_group.init_process_group() first, which without a launcher makes a group "
            "of one"
        )
    world = dist.distributed_c10d._get_default_group()
    if num_instances == 1:
        return world
    if num_instances < 1 or world.size() % num_instances:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {num_instances}, which does not divide the {world.size()} ranks"
        )
    shape = (num_instances, world.size() // num_instances)
    return init_device_mesh(device.device_type(), shape, mesh_dim_names=("replicate", "shard"))


SPLITS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Fields of a model's config that say over how many ranks the model is split."""


def _initialized_groups(num_instances: int) -> DataParallelGroups:
    state = process_groups.groups("the 'dp_cp' group")
    whole, mesh = state.by_kind["dp_cp"].process_group, state.data_parallel_mesh
    experts = _initialized_experts(state, num_instances, whole.size()) if state.experts_are_apart else None
    if num_instances == 1:
        return DataParallelGroups(whole, whole, given_mesh=mesh if mesh.ndim == 1 else None, experts=experts)
    num_replicas = mesh.size(0) if mesh.ndim == 2 else 1
    if num_instances != num_replicas:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {num_instances}, but shardstack.parallel_state was initialised "
            f"with {num_replicas}; give both the same number"
        )
    return DataParallelGroups(whole, mesh.get_group(1), mesh.get_group(0), mesh, experts)


def _initialized_experts(state: ParallelGroups, num_instances: int, num_dense_replicas: int) -> DataParallelGroups:
    mesh, whole = state.expert_data_parallel_mesh, state.by_kind["expert_dp"].process_group
    of_instances = num_instances > 1 and mesh.ndim == 2
    return DataParallelGroups(
        whole,
        mesh.get_group(1) if of_instances else whole,
        mesh.get_group(0) if of_instances else None,
        mesh if of_instances == (mesh.ndim == 2) else None,
        num_dense_replicas=num_dense_replicas,
    )
