"""Stores the process groups of this process, and makes the getters that differ only in the kind of group.

Before initialisation a rank is alone: some getters then return a value without a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..base.errors import ParallelConfigError, ParallelStateError
from .make_groups import ParallelGroups, RankGroup

_groups: ParallelGroups | None = None
"""The groups of this process. None while there is no parallel state. `set_groups` sets and clears it.
`parallel_state` calls that on initialisation and on destruction."""


_virtual_pipeline_rank: int | None = None
"""The virtual pipeline stage of this process at the moment, for scripts to read. Schedules and scripts set it by
`set_virtual_pipeline_rank`. `set_groups` clears it."""


def set_groups(groups: ParallelGroups | None) -> None:
    """Stores the groups. None removes them."""
    global _groups
    _groups = groups
    set_virtual_pipeline_rank(None)


def set_virtual_pipeline_rank(rank: int | None) -> None:
    """Stores the virtual pipeline stage."""
    global _virtual_pipeline_rank
    _virtual_pipeline_rank = rank


def virtual_pipeline_rank() -> int | None:
    """Returns the virtual pipeline stage, or None."""
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

    def getter() -> int:
        return size(kind, alone)

    getter.__doc__ = f"Returns the size of the {what}{'' if alone is None else f'; {alone} before initialisation'}."
    return getter


def rank_getter(kind: str, what: str, alone: int | None = None) -> Callable[[], int]:
    """Makes a getter of this rank's place, which returns `alone`, if given, before initialisation."""

    def getter() -> int:
        return rank(kind, alone)

    getter.__doc__ = (
        f"Returns this rank's place in the {what}{'' if alone is None else f'; {alone} before initialisation'}."
    )
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
    for name, made in module.items():
        if getattr(made, "__qualname__", "").endswith("<locals>.getter"):
            made.__name__ = made.__qualname__ = name
            made.__module__ = module["__name__"]
