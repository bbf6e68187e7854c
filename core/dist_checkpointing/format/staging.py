"""Copies on the host of what a rank is about to write, so that training can go on while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from ...host_memory import host_pages
from ..views.flat_range import FlatRange

_ALIGNMENT_BYTES = 64


class HostStaging:
    """Host memory that copies are put into, kept from one checkpoint to the next: only the first has to allocate it.

    It is as large as what this rank writes of a checkpoint; pinned where copies come from a GPU. Which pieces that are
    is known when all ranks have planned together. For a state that is cut as the last one was, on all ranks, it is
    known before: then the copies are taken `ahead` of the plan, which is made in the background too.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        """Set when the copies are complete."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: dict[str, Any] | None = None
        self._planned: list[MetadataIndex] | None = None
        self._ahead: dict[MetadataIndex, Tensor] | None = None

    def begin(self, state: Mapping[str, Tensor], agree: Callable[[bool], bool]) -> None:
        """Begins a checkpoint of `state`: takes its copies now if what this rank writes of it is known.

        Args:
            agree: whether all ranks say so; collective.
        """
        self.done.clear()
        layout = {name: _cut(tensor) for name, tensor in state.items()}
        known = agree(self._planned is not None and layout == self._layout)
        self._layout, self._ahead = layout, None
        if not known:
            self._planned = None
            return
        planned = self._planned or []
        copies = self._copy([find_state_dict_object(dict(state), index).detach() for index in planned])
        self._ahead = dict(zip(planned, copies, strict=True))
        self.done.set()

    def take(self, indices: Sequence[MetadataIndex], resolve: Callable[[int], Tensor]) -> list[Tensor]:
        """Contiguous copies on the host of the pieces that were planned; those of the last checkpoint are gone.

        Args:
            indices: name and offset of each piece.
            resolve: the piece at that position of `indices`.
        """
        if self._ahead is None:
            copies = self._copy([resolve(position) for position in range(len(indices))])
            self._planned = list(indices)
            self.done.set()
            return copies
        if missing := [index.fqn for index in indices if index not in self._ahead]:
            raise CheckpointError(
                "the ranks planned otherwise than for the last checkpoint, which was cut in the same way: "
                f"{missing[0]} was not copied in time; save it again"
            )
        return [self._ahead[index] for index in indices]

    def _copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        if len(self._memory) < end or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free before the larger one is there
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=True) if on_gpu else host_pages(end)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            copy = self._memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=on_gpu))
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return copies


def _cut(tensor: Tensor) -> Any:
    """What decides which pieces of a tensor this rank may write."""
    if not isinstance(tensor, Tensor):
        return None  # refused, with a message, when it is saved
    whole = (tensor.dtype, tuple(tensor.shape))
    if isinstance(tensor, FlatRange):
        return *whole, tuple(tensor.boxes)
    if isinstance(tensor, DTensor):
        return *whole, tensor.device_mesh, tensor.placements
    return whole
