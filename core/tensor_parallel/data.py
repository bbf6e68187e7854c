"""Broadcasts a batch that one tensor-parallel rank has read to its group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from ..base.device import current_device
from ..base.errors import DataError
from ..comm.collectives import broadcast_by_backend
from .groups import Group, group_rank, group_size, resolve_group

Key = TypeVar("Key", bound=Hashable)

_MAX_DIMS = 5


def broadcast_data(
    keys: Sequence[Key], data: Mapping[Key, torch.Tensor], datatype: torch.dtype, tp_group: Group = None
) -> dict[Key, torch.Tensor]:
    """Broadcasts the tensors `data[key]` of the group's first rank, and returns them on every rank's device.

    Two broadcasts: of the shapes, and of all elements together. Other ranks' `data` is not read and may be empty.

    Args:
        keys: keys of the tensors; the same on every rank.
        data: tensors by key; all of `datatype`, with up to five dimensions.
        datatype: dtype of all tensors.
        tp_group: default is the tensor-parallel group of `shardstack.parallel_state`.

    Raises:
        DataError: on the first rank, before anything is sent: a tensor is missing, of another dtype, or has more
            dimensions.
    """
    group = resolve_group(tp_group)
    if is_source := group_rank(group) == 0:
        _check(keys, data, datatype)
    if group is None or group_size(group) == 1:
        return {key: data[key].to(current_device()) for key in keys}
    shapes = torch.zeros(len(keys), 1 + _MAX_DIMS, dtype=torch.int64)  # number of dims, then their lengths
    if is_source:
        for row, key in zip(shapes, keys, strict=True):
            sizes = data[key].shape
            row[: 1 + len(sizes)] = torch.tensor([len(sizes), *sizes])
    shapes = shapes.to(current_device())
    broadcast_by_backend(shapes, group, what="the shapes of the batch")
    sizes_of = {key: torch.Size(row[1 : 1 + row[0]]) for key, row in zip(keys, shapes.tolist(), strict=True)}
    if is_source:
        flat = torch.cat([data[key].to(current_device()).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(map(torch.Size.numel, sizes_of.values())), dtype=datatype, device=current_device())
    broadcast_by_backend(flat, group, what="the batch")
    parts = flat.split([sizes.numel() for sizes in sizes_of.values()])
    return {key: part.view(sizes) for (key, sizes), part in zip(sizes_of.items(), parts, strict=True)}


def _check(keys: Sequence[Key], data: Mapping[Key, torch.Tensor], datatype: torch.dtype) -> None:
    for key in keys:
        if key not in data:
            raise DataError(f"broadcast_data was asked for {key!r}, and the data has {sorted(map(str, data))}")
        if data[key].dtype != datatype:
            raise DataError(f"data {key!r} is {data[key].dtype}, and datatype is {datatype}; cast it first")
        if data[key].dim() > _MAX_DIMS:
            raise DataError(f"data {key!r} has {data[key].dim()} dimensions; at most {_MAX_DIMS} are sent; flatten it")
