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

    It compares sums of the parameters' bits. Torch's count of in-place writes would be cheaper, but misses writes
    through ``.data``, and a checkpoint loader's writes to the local part of a DTensor. (A sum does not detect values
    that only change places in memory.)

    Args:
        params: the parameters that the optimizer updates.
    """

    def __init__(self, params: Sequence[MainParam]) -> None:
        self._params = [p for p in params if p.is_low_precision and p.main.numel()]  # fixed
        # Sums of bits when masters and parameters last agreed, on the device. `note_agreement` sets it without waiting
        # for the device, `find_written` compares it. None without parameters in low precision.
        self._sums: Tensor | None = None
        self.note_agreement()

    def note_agreement(self) -> None:
        """Records that masters and parameters agree; called after one was copied into the other."""
        self._sums = self._sums_of_bits()

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
        found = self._sums_of_bits()
        return None if found is None or self._sums is None else found != self._sums

    def _sums_of_bits(self) -> Tensor | None:
        """Returns one int64 for each parameter; None without parameters."""
        if not self._params:
            return None
        device = self._params[0].main.device
        return torch.stack([_sum_of_bits(p.local()).to(device) for p in self._params])


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns the sum of a 16-bit tensor's bits as integers, a 0-dim int64; adds eight bytes at a time where they
    fit."""
    bits = tensor.detach().reshape(-1).view(torch.int16)
    start = min(-bits.storage_offset() % 4, len(bits))
    stop = len(bits) - (len(bits) - start) % 4
    total = bits[start:stop].view(torch.int64).sum()
    for rest in (bits[:start], bits[stop:]):
        if len(rest):
            total = total + rest.sum()
    return total
