"""What a job may change for its whole process, and what puts it back before the next job."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restores the environment, folder, arguments, search path, warnings, signals and torch's settings at its end."""
    environment, folder, arguments, path = dict(os.environ), Path.cwd(), list(sys.argv), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            if os.environ != environment:
                os.environ.clear()
                os.environ.update(environment)
            os.chdir(folder)
            sys.argv[:], sys.path[:] = arguments, path
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:
                torch.set_default_device(device)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
