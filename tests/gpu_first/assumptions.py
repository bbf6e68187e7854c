"""Measures what the design assumes of CUDA, on the GPU of this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from core.base.device import current_device

LAUNCHES, SLEEP_CYCLES, LONG_S = 5000, int(20e9), 0.5
"""Launches behind a kernel of about ten seconds; one that takes longer than `LONG_S` has waited for the device."""


def first_launch_that_waits(launch: Callable[[], object], launches: int = LAUNCHES) -> int | None:
    """Returns the number of the first launch that takes longer than `LONG_S`; None if none does."""
    for number in range(launches):
        start = time.monotonic()
        launch()
        if time.monotonic() - start > LONG_S:
            return number
    return None


def main() -> int:
    """Prints what was measured; returns 1 where an assumption does not hold."""
    device = current_device()
    x = torch.zeros(1, device=device)
    torch.cuda._sleep(SLEEP_CYCLES)
    number = first_launch_that_waits(lambda: x.add_(1))
    torch.cuda.synchronize()
    print(
        f"the host was {LAUNCHES} launches ahead of the device and did not wait"
        if number is None
        else f"the host waits for the device at launch {number}: what it reads late is not reached behind a hang"
    )
    weight, seen = torch.ones(4, device=device, requires_grad=True), list[bool]()
    computing = torch.cuda.current_stream()
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(torch.cuda.current_stream() == computing))
    output = weight * 2
    output.register_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(torch.cuda.current_stream() == computing)
        )
    )
    output.sum().backward()
    print(f"hooks and final callbacks of a backward run on the stream of the forward: {seen}")
    return 0 if seen == [True, True] else 1


if __name__ == "__main__":
    sys.exit(main())
