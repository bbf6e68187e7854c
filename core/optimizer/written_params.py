"""Notices parameters in low precision that something else than the optimizer has written: a load, a clamp, an average.

Their fp32 masters would win at the next step, and undo the write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.host_read import HostRead
from .main_params import MainParam


class WrittenParams:
    """Compares the parameters in low precision with what they were when their masters last agreed with them.

    Torch's count of in-place writes would be cheaper to compare, but does not see all: not writes through ``.data``,
    nor those of a checkpoint's loader to the local part of a DTensor. So the bits themselves are summed. (A sum does
    not see values that only change places in memory.)

    Args:
        params: what the optimizer updates.
    """

    def __init__(self, params: Sequence[MainParam]) -> None:
        self._params = [p for p in params if p.is_low_precision and p.main.numel()]  # fixed
        # Sums of bits when masters and parameters agreed last, on the device: set by `note_agreement`, which does not
        # wait for it, and compared by `find_written`. None without parameters in low precision.
        self._sums: Tensor | None = None
        self.note_agreement()

    def note_agreement(self) -> None:
        """Notes that masters and parameters agree; called after either was written into the other."""
        self._sums = self._sums_of_bits()

    @property
    def names(self) -> list[str]:
        """The parameters that are watched."""
        return [p.name for p in self._params]

    def refresh_masters(self) -> None:
        """Takes into the masters what was written into their parameters since; waits for the device once.

        An element that still is its master rounded keeps all digits of the master: a checkpoint's weights may be
        loaded after its masters.
        """
        found = self.find_written()
        if found is None:
            return
        for p, is_written in zip(self._params, HostRead(found).wait(), strict=True):
            if is_written:
                local = p.local()
                p.main.copy_(torch.where(p.main.to(local.dtype) == local, p.main, local.float()))

    def find_written(self) -> Tensor | None:
        """Returns which parameters were written since, `[len(names)]` bools on the device; None if there are none."""
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
