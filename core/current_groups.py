"""The process groups of this process and what a script says in their place: what every getter reads.

Before initialisation a rank is alone: where a getter gives a value for that, no group has to exist.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .errors import ParallelStateError
from .parallel_groups import ParallelGroups, RankGroup

_groups: ParallelGroups | None = None
"""Set and cleared by `set_groups`, which `parallel_state` calls on initialisation and on destruction."""

assumed_sizes: dict[str, int] = {}
"""By kind of group, what a setter of `group_getters` gave; it is valid until that setter is given None, or the groups
are destroyed."""

assumed_ranks: dict[str, int] = {}
"""The same for this rank's place in a group."""


def set_groups(groups: ParallelGroups | None) -> None:
    """Keeps the groups that were made; None: there are none any more, and nothing is assumed in their place."""
    global _groups
    _groups = groups
    if groups is None:
        assumed_sizes.clear()
        assumed_ranks.clear()


def groups_or_none() -> ParallelGroups | None:
    """What was made, if anything."""
    return _groups


def groups(asked: str) -> ParallelGroups:
    """What was made; raises ParallelStateError, which names what was asked for, where nothing was."""
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
            f"rank {dist.get_rank()} is at a pipeline stage without {kind!r} group; ask is_rank_in_{kind}_group() "
            "first"
        )
    return by_kind[kind]


def has(kind: str) -> bool:
    """Returns whether this rank is in a group of this kind."""
    return _groups is not None and kind in _groups.by_kind


def process_group(kind: str, check_initialized: bool) -> ProcessGroup | None:
    """Returns this rank's process group of one kind; None where it has none and that is not to be checked."""
    return member(kind).process_group if check_initialized or has(kind) else None


def assume(assumed: dict[str, int], kind: str, value: int | None) -> None:
    """Sets, in `assumed_sizes` or `assumed_ranks`, what is returned for a group; None takes it back."""
    assumed.pop(kind, None)
    if value is not None:
        assumed[kind] = value


def size(kind: str, alone: int | None = None) -> int:
    """Number of ranks of the group; `alone`, where it is given, before initialisation."""
    if kind in assumed_sizes:
        return assumed_sizes[kind]
    return alone if _groups is None and alone is not None else len(member(kind).ranks)


def rank(kind: str, alone: int | None = None) -> int:
    """Returns this rank's place in the group; `alone`, where it is given, before initialisation."""
    if kind in assumed_ranks:
        return assumed_ranks[kind]
    return alone if _groups is None and alone is not None else member(kind).rank
