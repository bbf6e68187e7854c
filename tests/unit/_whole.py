"""Gathers tensors whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import model_state_dict
from core.dist_checkpointing.gathering import TensorStream
from core.dist_checkpointing.global_view import held_boxes


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor whose shards or flat ranges ranks hold. All ranks call it."""
    ((_, gathered),) = TensorStream({"the tensor": tensor.detach()})
    return gathered


def wholes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of several such tensors, whole. All ranks call it."""
    return {name: tensor.detach().clone() for name, tensor in TensorStream(tensors)}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters and buffers of a model, wrapped or not, whole. All ranks call it."""
    return wholes(model_state_dict(unwrap_model(model)))


def assembled(views: Mapping[str, Tensor], *, own_first: bool = False) -> dict[str, Tensor]:
    """Returns the tensors of all ranks, whole, put together by offsets. Every rank calls it, with names of its own.

    Args:
        own_first: take this rank's values where it holds any, also where those of other ranks differ.

    Raises:
        AssertionError: ranks hold different values of an element, or none does.
    """
    held = [(name, view.dtype, tuple(view.shape), held_boxes(view)) for name, view in views.items()]
    of_ranks: list[Any] = [held]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, held)
    found: dict[str, Tensor] = {}
    is_known: dict[str, Tensor] = {}
    for name, dtype, shape, boxes in itertools.chain(*of_ranks, held if own_first else ()):
        tensor = found.setdefault(name, torch.zeros(shape, dtype=dtype))
        known = is_known.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        for offsets, values in boxes:
            place = tuple(slice(o, o + s) for o, s in zip(offsets, values.shape, strict=True))
            same = ~known[place] | (tensor[place] == values) | ((values != values) & (tensor[place] != tensor[place]))
            assert own_first or bool(same.all()), f"ranks hold different values of {name}"
            tensor[place], known[place] = values.detach(), True
    assert not [name for name, known in is_known.items() if not known.all()], "no rank holds some elements"
    return found
