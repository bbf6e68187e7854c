"""Makes and destroys the process groups of this process, keeps them, and makes getters that differ only in their kind.

Before initialisation a rank is alone: some getters then return a value without a group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..base._torch_compat import forget_sharding_decisions
from ..base.errors import ParallelConfigError, ParallelStateError
from ..base.megatron_names import checks_arguments, refuse
from .make_groups import ParallelGroups, ParallelSizes, RankGroup, make_parallel_groups

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
            f"{what} was asked for before initialisation; call core.parallel_state.initialize_model_parallel() first"
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


def has(kind: str) -> bool:
    """Returns whether this rank is in a group of this kind."""
    return _groups is not None and kind in _groups.by_kind


def process_group(kind: str, check_initialized: bool) -> ProcessGroup | None:
    """Returns this rank's process group of one kind, or None if it has none and `check_initialized` is False."""
    return member(kind).process_group if check_initialized or has(kind) else None


def size(kind: str, alone: int | None = None) -> int:
    """Returns the number of ranks of the group, or before initialisation `alone`, if given."""
    return alone if _groups is None and alone is not None else len(member(kind).ranks)


def rank(kind: str, alone: int | None = None) -> int:
    """Returns this rank's place in the group, or before initialisation `alone`, if given."""
    return alone if _groups is None and alone is not None else member(kind).rank


class GroupGetter(Protocol):
    """Returns this rank's process group, or None if it has none and `check_initialized` is False."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup | None: ...


def group_getter(kind: str, text: str) -> GroupGetter:
    """Makes a getter of this rank's process group. `text` is its docstring."""

    def getter(check_initialized: bool = True) -> ProcessGroup | None:
        return process_group(kind, check_initialized)

    getter.__doc__ = text
    return getter


def size_getter(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of the number of ranks, which returns `alone`, if given, before initialisation."""
    return _getter(size, kind, f"the size of the {what}", alone)


def rank_getter(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of this rank's place, which returns `alone`, if given, before initialisation."""
    return _getter(rank, kind, f"this rank's place in the {what}", alone)


def _getter(read: Callable[[str, int | None], int], kind: str, what: str, alone: int | None) -> Callable[[], int]:
    def getter() -> int:
        return read(kind, alone)

    getter.__doc__ = f"Returns {what}{'' if alone is None else f'; {alone} before initialisation'}."
    return getter


def data_parallel_kind(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    """Returns the kind of data-parallel group that these arguments of Megatron-LM's getters ask for."""
    if partial_data_parallel and not with_context_parallel:
        raise ParallelConfigError(
            "partial_data_parallel=True was asked for without with_context_parallel=True; an optimizer instance "
            "shards over both, so pass both"
        )
    return "dp_shard_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp"


def name_functions(module: dict[str, Any]) -> None:
    """Names the functions made here after their variables in a module, for tracebacks and `help`."""
    for name, function in module.items():
        if getattr(function, "__qualname__", "").endswith("<locals>.getter"):
            function.__name__ = function.__qualname__ = name
            function.__module__ = module["__name__"]


@checks_arguments
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    local_world_size: int | None = None,
) -> None:
    """Makes every model-, context-, data- and expert-parallel group. All ranks call it with equal arguments.

    The leftmost token of `order` has stride 1. With 8 ranks and tensor and pipeline size 2 the tensor-parallel groups
    are [0,1] [2,3] [4,5] [6,7], the data-parallel ones [0,2] [1,3] [4,6] [5,7], the pipelines [0,4] [1,5] [2,6] [3,7].

    `num_distributed_optimizer_instances` divides the data-parallel (x context-parallel) group into as many consecutive
    parts: optimizer state is sharded within a part and replicated across parts. All groups are new, also one that
    spans the world, with the default group's backend and `distributed_timeout_minutes` as their time limit; kinds with
    equal ranks share one group. Experts' matrices are split over `expert_tensor_parallel_size` ranks, by default as
    many as those of dense layers.

    Takes Megatron-LM's other arguments too, all in its order. Refused, with the argument's name: hierarchical or
    hybrid context parallelism, weights rematerialised over a group, other ranks of embeddings, and groups over a part
    of the world. Settings of communicators (SHARP, NCCL's options, streams, Gloo groups next to NCCL's) change no
    number: they are ignored, with one warning that names them.

    Raises:
        ParallelStateError: `torch.distributed` is not initialised, or the groups exist already.
        ParallelConfigError: sizes or the order contradict each other or do not divide the world; or an argument is
            refused.
    """
    world = dist.group.WORLD
    if world is None:
        raise ParallelStateError(
            "torch.distributed is not initialised; call core.base.default_group.init_process_group() before "
            "initialize_model_parallel()"
        )
    if _groups is not None:
        raise ParallelStateError(
            "model parallel groups exist already; call destroy_model_parallel() before initialising them again"
        )
    num_ranks = world.size()
    is_whole = (local_world_size or num_ranks, num_ranks, "groups span the whole world")
    refuse("initialize_model_parallel", local_world_size=is_whole)
    if distributed_timeout_minutes <= 0:
        raise ParallelConfigError(f"distributed_timeout_minutes is {distributed_timeout_minutes}; make it positive")
    sizes = ParallelSizes(
        world=num_ranks,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        virtual_pipeline=virtual_pipeline_model_parallel_size,
        context=context_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=tensor_model_parallel_size
        if expert_tensor_parallel_size is None
        else expert_tensor_parallel_size,
        optimizer_instances=num_distributed_optimizer_instances,
        order=order,
    )
    set_groups(make_parallel_groups(world, sizes, timedelta(minutes=distributed_timeout_minutes)))


def destroy_model_parallel() -> None:
    """Destroys the groups of `initialize_model_parallel`, if any. Keeps the default group."""
    if _groups is not None:
        _groups.destroy()
        forget_sharding_decisions()
    set_groups(None)
