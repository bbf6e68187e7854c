"""Stores the process groups of this process, for all getters.

Before initialisation a rank is alone: some getters then return a value without a group.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import ParallelStateError
from .make_groups import ParallelGroups, RankGroup

_groups: ParallelGroups | None = None
"""The groups of this process; None while there is no parallel state. `set_groups` sets and clears it;
`parallel_state` calls that on initialisation and on destruction."""


def set_groups(groups: ParallelGroups | None) -> None:
    """Stores the groups; None removes them."""
    global _groups
    _groups = groups


def groups_or_none() -> ParallelGroups | None:
    """Returns the groups, or None before initialisation."""
    return _groups


def groups(asked: str) -> ParallelGroups:
    """Returns the groups; before initialisation raises ParallelStateError, which names `asked`."""
    if _groups is None:
        raise ParallelStateError(
            f"{asked} was asked for before initialisation; call core.parallel_state.initialize_model_parallel() first"
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
    """Returns this rank's process group of one kind; None if it has none and `check_initialized` is False."""
    return member(kind).process_group if check_initialized or has(kind) else None


def size(kind: str, alone: int | None = None) -> int:
    """Returns the number of ranks of the group; before initialisation `alone`, if given."""
    return alone if _groups is None and alone is not None else len(member(kind).ranks)


def rank(kind: str, alone: int | None = None) -> int:
    """Returns this rank's place in the group; before initialisation `alone`, if given."""
    return alone if _groups is None and alone is not None else member(kind).rank
