"""A tensor-parallel group, or None for a rank alone."""

from __future__ import annotations

import torch.distributed as dist

from .. import parallel_state

Group = dist.ProcessGroup | None


def resolve_group(group: Group) -> Group:
    """Returns `group`, else the tensor-parallel group of `core.parallel_state`, else None if that is not
    initialised."""
    return group if group is not None else parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def group_size(group: Group) -> int:
    """Returns the number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """Returns this rank's number in `group`; 0 for None."""
    return 0 if group is None else group.rank()
