"""Measures a rank for the log: seconds, and its peak memory."""

from __future__ import annotations

import resource
import sys
import time

import torch

from ... import device


def peak_memory_bytes() -> int:
    """Returns this rank's peak memory in bytes: of the GPU if there is one, else of the process."""
    if device.device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()  # time of the construction or of the last `read`, which sets it

    def read(self) -> float:
        """Returns the seconds, never zero, and restarts."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        return seconds
