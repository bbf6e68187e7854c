"""Counts the bytes that torch's allocator has handed out while it is active, as long as they live, on this thread."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from core.base.host_memory import transient_memory_seen_by_profilers
from core.training.memory_profile import _flat


class LiveBytes(ExitStack):
    """On the CPU, by the allocations that torch's profiler reports. A release on another thread is not reported: its
    memory counts until the address is used again."""

    def __enter__(self) -> LiveBytes:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints that it starts and stops
        super().__enter__()
        self.peak = 0
        self.callback(self._count)
        self.enter_context(transient_memory_seen_by_profilers())
        self._profiler = self.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        return self

    def _count(self) -> None:
        events: Any = _flat(self._profiler.profiler.kineto_results.experimental_event_tree())
        events = (event for event in events if event.tag == torch._C._profiler._EventType.Allocation)
        changes = ((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size) for event in events)
        alive = dict[int, int]()
        for _, address, num_bytes in sorted(changes):
            if num_bytes > 0:
                alive[address] = num_bytes
            else:
                alive.pop(address, None)
            self.peak = max(self.peak, sum(alive.values()))
