"""Measures the rates of the machine that it runs on."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..base import device
from ..comm import streams
from .hardware import Hardware

_REPEATS = 7
_MOST_SPREAD = 0.2


def calibrate(links: Hardware) -> tuple[Hardware, str]:
    """Returns this machine's hardware, and a line that says that the machine was busy, or "".

    Args:
        links: the hardware whose links, node and attention are taken, the last in proportion to products.
    """
    place = device.current_device()
    is_gpu = place.type == "cuda"
    size, elements = (8192, 2**28) if is_gpu else (768, 2**24)
    halves = torch.randn(2, size, size, device=place).bfloat16()
    wholes, small = halves.float(), torch.zeros(1, device=place)
    source = torch.zeros(elements, device=place)
    target = torch.zeros_like(source)
    times = {
        "half": _seconds(lambda: torch.mm(halves[0], halves[1])),
        "fp32": _seconds(lambda: torch.mm(wholes[0], wholes[1])),
        "copy": _seconds(lambda: target.copy_(source)),
        "launch": _seconds(lambda: [small.add_(1) for _ in range(1000)]),
    }
    half, fp32, copy, launch = (statistics.median(seconds) for seconds in times.values())
    spread = max(max(seconds) / min(seconds) - 1 for seconds in times.values())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = spread > _MOST_SPREAD or load > (os.cpu_count() or 1) / 2
    matmul = 2 * size**3 / half
    hardware = replace(
        links,
        name=torch.cuda.get_device_name(place) if is_gpu else "cpu",
        memory_bytes=device.memory_bytes(),
        peak_flops=links.peak_flops if is_gpu else matmul,
        matmul_flops=matmul,
        fp32_flops=2 * size**3 / fp32,
        attention_flops=links.attention_flops / links.matmul_flops * matmul,
        memory_bandwidth=2 * source.nbytes / copy,
        launch_s=launch / 1000,
        source=f"measured; links, node and the share of attention as of {links.name}",
    )
    warning = (
        f"warning: the machine was busy: times of one operation differ by {100 * spread:.0f} %, and its load is "
        f"{load:.1f}; calibrate again when it is idle\n"
    )
    return hardware, warning if busy else ""


def _seconds(run: Callable[[], object]) -> list[float]:
    """Returns the seconds of each of some calls, after one that is not counted."""
    seconds = []
    for _ in range(_REPEATS + 1):
        _synchronize()
        began = time.perf_counter()
        run()
        _synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _synchronize() -> None:
    if device.device_type() == "cuda":
        streams.synchronize()
