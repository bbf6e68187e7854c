"""What the memory of a rank is for: the categories of wrappers, of measured and planned steps, and of errors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from .errors import ShardstackError
from .parameters import local_part

PARAMETERS: Final = "parameters"
"""This rank's shards, or whole parameters without sharding, and the model's buffers."""

GATHERED: Final = "gathered parameters"
GRADIENTS: Final = "gradients"

WHOLE_GRADIENTS: Final = "gradients not reduced yet"
"""The part of `GRADIENTS` that a reduction will free."""

OPTIMIZER_STATE: Final = "optimizer state"
"""Master copies of parameters included."""

REST: Final = "activations and other"

CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, WHOLE_GRADIENTS, OPTIMIZER_STATE, REST)

Held = Literal["parameters", "gathered parameters", "gradients", "gradients not reduced yet"]
"""The categories of a wrapper's memory."""


T = TypeVar("T")


def held_storages(held: Iterable[tuple[T, Iterable[Tensor]]], device_type: str) -> dict[int, tuple[T, int]]:
    """Returns the first category that has each storage on a kind of device, and its bytes, by the storage's address.

    Args:
        held: categories and their tensors.
    """
    storages: dict[int, tuple[T, int]] = {}
    for category, tensors in held:
        for local in map(local_part, tensors):
            storage = local.untyped_storage()
            if storage.nbytes() and local.device.type == device_type:
                storages.setdefault(storage.data_ptr(), (category, storage.nbytes()))
    return storages


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yields what one of torch's optimizers holds: its state, and what it updates, which may be the model's own."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    for group in optimizer.param_groups:
        yield from group["params"]


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer one of `known_optimizers`."""
    _optimizers.add(optimizer)


def known_optimizers() -> list[torch.optim.Optimizer]:
    """Returns the optimizers that step parameters of wrapped models, as far as they exist."""
    return list(_optimizers)


_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Noted optimizers. `note_optimizer` adds one of `shardstack.optimizer` when it is built, and any other before its
step. Freed optimizers drop out."""


_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory could not be allocated, on the host or an accelerator."""
    if isinstance(error, ShardstackError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
