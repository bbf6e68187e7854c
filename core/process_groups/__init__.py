"""The process groups of this process as values, which `shardstack.parallel_state` returns under Megatron-LM's names.

`make_groups` divides the world, and makes and destroys the groups. The library does not import it: wrappers and
optimizers take groups, whoever made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import ParallelStateError


@dataclass(frozen=True)
class RankGroup:
    """This rank's group of one kind: global ranks ascending, and this rank's place among them."""

    process_group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups and meshes of `initialize_model_parallel` on this rank."""

    by_kind: Mapping[str, RankGroup]
    process_groups: tuple[ProcessGroup, ...]
    """The distinct process groups of this rank: kinds with equal ranks share one."""
    world: ProcessGroup
    """The default group at initialisation: the others are destroyed with it, and unknown to a later default group."""
    mesh: DeviceMesh
    data_parallel_mesh: DeviceMesh
    expert_data_parallel_mesh: DeviceMesh
    experts_are_apart: bool
    virtual_pipeline_size: int | None = None
    """Pipeline stages of each rank. None: one."""

    def destroy(self) -> None:
        """Destroys the process groups except the default group."""
        if dist.is_initialized() and dist.group.WORLD is self.world:
            for process_group in self.process_groups:
                dist.destroy_process_group(process_group)


_groups: ParallelGroups | None = None
"""The groups of this process. None while there is no parallel state. `set_groups` sets and clears it.
`initialize_model_parallel` and `destroy_model_parallel` call that."""


_virtual_pipeline_rank: int | None = None
"""The virtual pipeline stage of this process at the moment, for scripts to read. Schedules and scripts set it by
`set_virtual_pipeline_model_parallel_rank`. `set_groups` clears it."""


def set_groups(groups: ParallelGroups | None) -> None:
    """Stores the groups. None removes them."""
    global _groups
    _groups = groups
    set_virtual_pipeline_model_parallel_rank(None)


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets what `get_virtual_pipeline_model_parallel_rank` returns."""
    global _virtual_pipeline_rank
    _virtual_pipeline_rank = rank


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the virtual stage whose forward runs, or that a script has set, or None."""
    return _virtual_pipeline_rank


def groups_or_none() -> ParallelGroups | None:
    """Returns the groups, or None before initialisation."""
    return _groups


def groups(what: str) -> ParallelGroups:
    """Returns the groups. Before initialisation raises ParallelStateError, which names `what`."""
    if _groups is None:
        raise ParallelStateError(
            f"{what} was asked for before initialisation; call "
            "shardstack.parallel_state.initialize_model_parallel() first"
        )
    return _groups


def member(kind: str) -> RankGroup:
    """Returns this rank's group of one kind.

    Raises:
        ParallelStateError: there are no groups, or none of this kind at this rank's pipeline stage.
    """
    by_kind = groups(f"the {kind!r} group").by_kind
    if kind not in by_kind:
        raise ParallelStateError(
            f"rank {dist.get_rank()} is at a pipeline stage without {kind!r} group; get_{kind}_group(False) returns "
            "None there"
        )
    return by_kind[kind]


def process_group(kind: str, check_initialized: bool) -> ProcessGroup | None:
    """Returns this rank's process group of one kind, or None if it has none and `check_initialized` is False."""
    is_there = _groups is not None and kind in _groups.by_kind
    return member(kind).process_group if check_initialized or is_there else None
