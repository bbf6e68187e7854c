"""Counts a rank's memory by category, from the wrapper's tensors and the optimizers that have stepped."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..dtensors import local_part
from ..text import readable_bytes
from .step_marks import known_optimizers

PARAMETERS = "parameters"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
WHOLE_GRADIENTS = "gradients not reduced yet"
OPTIMIZER_STATE = "optimizer state"
REST = "activations and other"

CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, WHOLE_GRADIENTS, OPTIMIZER_STATE, REST)


class HoldsTensors(Protocol):
    """The part of a wrapper that this file uses."""

    def held_tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """Returns the wrapper's tensors by category."""


def memory_by_category(wrapper: HoldsTensors, device_type: str) -> dict[str, int]:
    """Returns the bytes of this rank's memory on a kind of device, for each of `CATEGORIES`.

    A storage counts once, in the first category that has it. The last category is everything else that the process
    holds: of torch's allocations on an accelerator, of the resident set on the host, Python itself included.
    """
    table = dict.fromkeys(CATEGORIES, 0)
    seen: set[int] = set()

    def add(category: str, tensor: Tensor | None) -> None:
        local = None if tensor is None else local_part(tensor)
        if local is None or local.device.type != device_type:
            return
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            table[category] += storage.nbytes()

    held = wrapper.held_tensors()
    for category in (PARAMETERS, GATHERED, WHOLE_GRADIENTS, GRADIENTS):  # whole gradients are named twice
        for tensor in held[category]:
            add(category, tensor)
    for optimizer in known_optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                add(OPTIMIZER_STATE, parameter.detach())  # a master copy; seen already where it is the model's own
                for value in optimizer.state.get(parameter, {}).values():
                    add(OPTIMIZER_STATE, value if isinstance(value, Tensor) else None)
    table[REST] = max(0, held_bytes(device_type) - sum(table.values()))
    return table


def held_bytes(device_type: str) -> int:
    """Returns the bytes that this process holds on a kind of device; 0 on a host that does not report them."""
    if device_type == "cuda":
        return int(torch.cuda.memory_allocated())
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return resident_pages * _PAGE_BYTES


_PAGE_BYTES = mmap.PAGESIZE


def table_lines(table: dict[str, int]) -> list[str]:
    """Formats the table: a line for each category that is not empty, and one for the sum."""
    rows = [(name, readable_bytes(size)) for name, size in table.items() if size]
    rows.append(("together", readable_bytes(sum(table.values()))))
    return [f"  {name:<26} {size:>9}" for name, size in rows]
