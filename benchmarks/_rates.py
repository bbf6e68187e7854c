"""Times calls on a GPU or the CPU, and a matrix product and a copy, whose rates others are compared with."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import high_water_bytes, reset_high_water

MATMUL_WARMUP_S = 2.0
"""A GPU's clock falls under load: a product is timed after so long."""


def matmul_tflops(device: torch.device) -> float:
    """Returns the rate of a large bf16 matrix product; on a GPU a sustained one, after seconds of them."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if device.type == "cuda":
        _run_for(MATMUL_WARMUP_S, lambda: left @ right, torch.cuda.synchronize)
    seconds = median_seconds(lambda: left @ right, device, 50 if device.type == "cuda" else 20)
    return 2 * size**3 / seconds / 1e12


def copy_rate(device: torch.device) -> float:
    """Returns the GB a second, read and written, of a copy within the device; on a GPU far larger than its caches."""
    size = 2**30 if device.type == "cuda" else 2**24
    # Random bytes: a chip moves zeros with less power, and may then keep a higher clock.
    source, target = (torch.randint(256, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    seconds = median_seconds(lambda: target.copy_(source), device, 20)
    return 2 * size / seconds / 1e9


def _run_for(seconds: float, run: Callable[[], Any], wait: Callable[[], None]) -> None:
    """Keeps the device busy for so long, with few waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            run()
        wait()


def median_seconds(run: Callable[[], Any], device: torch.device, count: int, warmup: int = 3) -> float:
    """Returns the median seconds of a call; on a GPU between events, so that the host may run ahead as in training."""
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else high_water_bytes()


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_high_water()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
