"""A tensor-parallel group, or None for a rank alone."""

from __future__ import annotations

import torch.distributed as dist

from .. import parallel_state

Group = dist.ProcessGroup | None


def resolve_group(group: Group) -> Group:
    """`group`, or the tensor-parallel group of `core.parallel_state`, or None before that is initialised."""
    return group if group is not None else parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def group_size(group: Group) -> int:
    """The number of ranks in `group`; no group is one rank."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """This rank's number within `group`; 0 without one."""
    return 0 if group is None else group.rank()
