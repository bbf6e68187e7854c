"""Memory that goes back to the system."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from core.host_memory import passing_memory_seen_by_profilers, transient_memory

CPU = torch.device("cpu")
MIB = 2**20


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])


def _comes_and_goes() -> tuple[int, int]:
    """Returns how many bytes the process has more with 16 MiB taken, and after they went, with others taken since."""
    before = _resident_bytes()
    taken = transient_memory(4 * MIB, torch.float32, CPU).fill_(1.0)
    with_it = _resident_bytes()
    behind = [torch.ones(1000) for _ in range(100)]
    view = taken[100:200].view(10, 10)
    del taken
    assert view.sum() == 100  # a view keeps it
    del view
    assert len(behind) == 100
    return with_it - before, _resident_bytes() - before


def test_freed_memory_leaves_the_process_from_anywhere():
    for _ in range(2):
        torch.empty(4 * MIB).fill_(1.0)  # from now on glibc keeps pieces of this size
    _comes_and_goes()  # code and small tensors take their memory
    while_taken, after = _comes_and_goes()
    assert while_taken >= 16 * MIB
    assert after < 2 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 1000, MIB + 3])
def test_it_has_the_length_and_the_dtype_that_were_asked_for(dtype, numel):
    taken = transient_memory(numel, dtype, CPU)
    assert (taken.shape, taken.dtype, taken.device) == ((numel,), dtype, CPU)
    assert taken.fill_(2.0).sum().item() == pytest.approx(2.0 * numel, rel=0.01)


def test_profilers_see_it_where_they_are_to():
    most = []
    for seen in (passing_memory_seen_by_profilers(), nullcontext()):
        with seen, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            taken = transient_memory(4 * MIB, torch.float32, CPU)
        most.append(max((event.self_cpu_memory_usage for event in profiler.key_averages()), default=0))
        del taken
    assert most[0] >= 16 * MIB > most[1]
