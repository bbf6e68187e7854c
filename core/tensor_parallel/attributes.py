"""Megatron-LM's attributes of a parameter: how it is split over tensor-parallel ranks."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from .groups import Group, group_rank, resolve_group

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Marks a tensor as split along `dim`; without `is_parallel`, as replicated on every rank.

    Raises:
        ConfigError: it is marked already.
    """
    marked = [name for name in _DEFAULTS if hasattr(tensor, name)]
    if marked:
        raise ConfigError(f"the tensor has {marked[0]} already; each is marked once")
    values = (is_parallel, dim, stride)
    for name, value in zip(_DEFAULTS, values, strict=True):
        setattr(tensor, name, value)


def has_tensor_parallel_attributes(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has the attributes, as every parameter of the layers of `core.tensor_parallel` does."""
    return hasattr(tensor, "partition_dim")


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Marks a tensor without attributes as replicated on every rank."""
    for name, default in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, default)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copies the attributes that the source has."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(
    param: torch.Tensor, tp_group: Group = None, expert_tp_group: Group = None
) -> bool:
    """Returns whether this rank counts the parameter in a norm over all tensor-parallel ranks.

    True for a split parameter, and on the group's first rank for a replicated one.

    Args:
        tp_group: default is the tensor-parallel group of `core.parallel_state`.
        expert_tp_group: the group for parameters marked ``allreduce=False``; default is `tp_group`.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    group = tp_group if getattr(param, "allreduce", True) or expert_tp_group is None else expert_tp_group
    return group_rank(resolve_group(group)) == 0
