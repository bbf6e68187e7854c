"""Detects writes to low-precision parameters by code other than the optimizer: a load, a clamp, an average.

Without detection, the next step would overwrite the new values from the fp32 masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.host_read import HostRead
from .main_params import MainParam


class WrittenParams:
    """Compares low-precision parameters with their values when masters and parameters last agreed.

    It compares sums of the parameters' bits over short runs of elements, and the bits themselves where a parameter is
    small. Torch's count of in-place writes would be cheaper, but misses writes through ``.data``, and a checkpoint
    loader's writes to the local part of a DTensor. (Sums do not detect values that change places within their run
    alone. A run is shorter than a row, and no row is a multiple of it: exchanged rows or columns do show.)

    Args:
        params: the parameters that the optimizer updates.
    """

    def __init__(self, params: Sequence[MainParam]) -> None:
        self._params = [p for p in params if p.is_low_precision and p.main.numel()]  # fixed
        # Sums of each parameter when masters and parameters last agreed, on its device. `note_agreement` sets them
        # without waiting for the device, `find_written` compares them.
        self._sums: list[Tensor] = []
        self.note_agreement()

    def note_agreement(self) -> None:
        """Records that masters and parameters agree; called after one was copied into the other."""
        self._sums = self._sums_of_runs()

    @property
    def names(self) -> list[str]:
        """Names of the watched parameters."""
        return [p.name for p in self._params]

    def refresh_masters(self) -> None:
        """Copies values that other code has written to parameters into the masters; waits for the device once.

        An element that still equals its rounded master keeps the master's full precision, because a checkpoint's
        weights may be loaded after its masters.
        """
        found = self.find_written()
        if found is None:
            return
        for p, is_written in zip(self._params, HostRead(found).wait(), strict=True):
            if is_written:
                local = p.local()
                p.main.copy_(torch.where(p.main.to(local.dtype) == local, p.main, local.float()))

    def find_written(self) -> Tensor | None:
        """Returns which parameters were written since, as bools `[len(names)]` on the device; None without any."""
        if not self._params:
            return None
        device = self._params[0].main.device
        pairs = zip(self._sums_of_runs(), self._sums, strict=True)
        return torch.stack([(now != before).any().to(device) for now, before in pairs])

    def _sums_of_runs(self) -> list[Tensor]:
        return [_sums_of_runs(p.local(), p.param.shape[-1] if p.param.ndim > 1 else 1) for p in self._params]


_WORDS_COMPARED = 4096
"""A tensor of so many 8-byte words at most is compared word by word: its copy is small."""

_WORDS_OF_RUN = 125
"""Words in a run. Odd, so that columns that change places cross the ends of runs; longer ones are hardly faster."""


def _sums_of_runs(tensor: Tensor, row: int) -> Tensor:
    """Returns the sums of a 16-bit tensor's bits over runs of eight-byte words, and what is left at its ends.

    Args:
        row: number of elements in a row of the parameter, 1 in a vector; runs are shorter, or single words.

    Returns:
        `[runs + rest]` in int64.
    """
    bits = tensor.detach().reshape(-1).view(torch.int16)
    start = min(-bits.storage_offset() % 4, len(bits))
    words = (len(bits) - start) // 4
    run = 1 if words <= _WORDS_COMPARED else max(1, min(_WORDS_OF_RUN, row // 4 - 1 | 1))
    stop = start + words // run * run * 4
    return torch.cat([bits[start:stop].view(torch.int64).view(-1, run).sum(1), bits[:start], bits[stop:]])
