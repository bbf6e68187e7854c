"""Copies a few numbers to the host without stalling the device.

Queues the copy now, and waits when the numbers are read. Reading a step later does not wait.

A host that reads a result of the device (``item``, ``tolist``, ``bool``) waits until the device has done all that is
queued, and queues nothing meanwhile. A `HostRead` waits only for what was queued before it was made. If a collective
before it does not end, because a rank did not join it, the wait raises before the backend's time limit, which would
end the process, and the error names the collective.
"""

from __future__ import annotations

import time

from torch import Tensor

from . import streams
from .record import is_recording, raise_if_late

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 1e-3
_LATE_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks for a collective that takes too long."""


class HostRead:
    """Numbers that are being copied to the host.

    Args:
        values: `[n]`, on any device; may change as soon as the constructor returns.
    """

    def __init__(self, values: Tensor) -> None:
        # Event at the end of the copy on the device's current stream; `wait` clears it. None if `_numbers` are valid.
        self._event: streams.Event | None = None
        if streams.is_asynchronous(values.device):
            # Pinned memory owned by this read, which the device writes until `_event`; the host reads it after.
            self._numbers = streams.pinned(values.shape, values.dtype)
            self._numbers.copy_(values, non_blocking=True)
            self._event = streams.record_event()
        else:
            self._numbers = values.clone()

    def wait(self) -> list[float]:
        """Returns the numbers, once they are there. May be called again.

        Raises:
            OutOfStepError: a collective queued before the copy did not end, because not all ranks joined it.
        """
        if self._event is not None:
            wait_for(self._event)
            self._event = None
        return _to_list(self._numbers)


def known_on_host(value: Tensor) -> float | None:
    """Returns a 0-dim tensor's number where the host has it, or None where it would have to wait for a device."""
    return _to_list(value.view(1))[0] if not streams.is_asynchronous(value.device) else None


def wait_for(event: streams.Event) -> None:
    """Waits on the host for a point in the device's work.

    Raises:
        OutOfStepError: a collective queued before that point did not end, because not all ranks joined it.
    """
    pause, last_check = _SHORTEST_PAUSE_S, time.monotonic()
    while not event.query():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if time.monotonic() - last_check > _LATE_CHECK_INTERVAL_S and is_recording():
            raise_if_late()
            last_check = time.monotonic()


def _to_list(numbers: Tensor) -> list[float]:
    """Reads numbers on the host, for all code of a step. `tests/unit/training/test_host_reads.py` counts the calls."""
    listed: list[float] = numbers.tolist()
    return listed
