"""A tensor-parallel group, or None for a rank alone, and checks of sizes that its ranks divide."""

from __future__ import annotations

import torch.distributed as dist

from .. import parallel_state
from ..base.errors import ParallelConfigError
from ..model_parallel_config import ModelParallelConfig

Group = dist.ProcessGroup | None


def resolve_group(group: Group) -> Group:
    """Returns `group`, else the tensor-parallel group of `core.parallel_state`, else None if that is not
    initialised."""
    return group if group is not None else parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def expert_tensor_group() -> Group:
    """Returns the ranks that share the matrices of each expert, None if nothing is initialised."""
    if parallel_state.experts_are_apart():
        return parallel_state.get_expert_tensor_parallel_group()
    return resolve_group(None)


def group_size(group: Group) -> int:
    """Returns the number of ranks in `group`, 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """Returns this rank's number in `group`, 0 for None."""
    return 0 if group is None else group.rank()


def check_degree(config: ModelParallelConfig, group: Group) -> None:
    """Raises ParallelConfigError unless the group has as many ranks as the config says.

    A config of 1, the default, takes any group, because Megatron-LM's scripts may leave the degree out: layers are
    split over their group in any case.
    """
    degree, num_ranks = config.tensor_model_parallel_size, group_size(group)
    if degree in (1, num_ranks):
        return
    fix = (
        "call initialize_model_parallel with the same size first, or pass tp_group"
        if group is None
        else "make them equal"
    )
    raise ParallelConfigError(
        f"config.tensor_model_parallel_size is {degree}, but the tensor-parallel group has {num_ranks} rank(s); {fix}"
    )


def per_rank(size: int, group: Group, what: str, degree: str = "tensor_model_parallel_size") -> int:
    """Returns a rank's part of `size`.

    Raises:
        ParallelConfigError: the ranks do not divide `size`, which the message calls `what`.
    """
    ranks = group_size(group)
    if size % ranks:
        raise ParallelConfigError(
            f"the {what} is {size}, which {degree} {ranks} does not divide; "
            f"make it {-(-size // ranks) * ranks}, or choose another {degree}"
        )
    return size // ranks
