"""Checks sizes that the ranks of a tensor-parallel group have to divide."""

from __future__ import annotations

from ..errors import ParallelConfigError
from ..model_parallel_config import ModelParallelConfig
from .groups import Group, group_size


def check_degree(config: ModelParallelConfig, group: Group) -> None:
    """Raises ParallelConfigError unless the group has as many ranks as the config says."""
    asked, found = config.tensor_model_parallel_size, group_size(group)
    if asked == found:
        return
    fix = (
        "call initialize_model_parallel with the same size first, or pass tp_group"
        if group is None
        else "make them equal"
    )
    raise ParallelConfigError(
        f"config.tensor_model_parallel_size is {asked}, but the tensor-parallel group has {found} rank(s); {fix}"
    )


def per_rank(size: int, group: Group, what: str) -> int:
    """Returns a rank's part of `size`; raises ParallelConfigError, which names it `what`, if ranks do not divide
    it."""
    ranks = group_size(group)
    if size % ranks:
        raise ParallelConfigError(
            f"the {what} is {size}, which tensor_model_parallel_size {ranks} does not divide; "
            f"make it {-(-size // ranks) * ranks}, or choose another tensor_model_parallel_size"
        )
    return size // ranks
