"""Copies on the host of what a rank is about to write, so that training can go on while it is written."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class HostStaging:
    """Host memory that copies are put into, kept from one checkpoint to the next: only the first has to allocate it.

    It is as large as what this rank writes of a checkpoint; pinned where copies come from a GPU.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        """Set when the copies are complete."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies on the host; overwrites those of the last call."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        if len(self._memory) < end or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free before the larger one is there
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            copy = self._memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=on_gpu))
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self.done.set()
        return copies
