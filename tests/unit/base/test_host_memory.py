"""Host memory that goes back to the system, or is kept for another use."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from core.base.host_memory import (
    LentMemory,
    ReusedMemory,
    shared_bytes,
    transient_memory,
    transient_memory_seen_by_profilers,
)

CPU = torch.device("cpu")
MIB = 2**20


def _resident_bytes(start: int, num_bytes: int) -> int:
    """Returns the resident memory of all mappings that a range of addresses is in."""
    resident, overlaps = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if (mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            first, end = (int(address, 16) for address in mapping.groups())
            overlaps = first < start + num_bytes and start < end
        elif overlaps and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def test_freed_memory_leaves_the_process_from_anywhere():
    for _ in range(2):
        torch.empty(4 * MIB).fill_(1.0)  # from now on glibc keeps pieces of this size
    taken = transient_memory(4 * MIB, torch.float32, CPU).fill_(1.0)
    place = taken.data_ptr(), taken.nbytes
    assert _resident_bytes(*place) >= 16 * MIB
    behind = [torch.ones(1000) for _ in range(100)]
    view = taken[100:200].view(10, 10)
    del taken
    assert view.sum() == 100 and _resident_bytes(*place) >= 16 * MIB  # a view keeps it
    del view
    assert len(behind) == 100 and _resident_bytes(*place) < 2 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 1000, MIB + 3])
def test_transient_memory_has_length_and_dtype(dtype, numel):
    taken = transient_memory(numel, dtype, CPU)
    assert (taken.shape, taken.dtype, taken.device) == ((numel,), dtype, CPU)
    assert taken.fill_(2.0).sum().item() == pytest.approx(2.0 * numel, rel=0.01)


def test_profilers_see_transient_memory_on_request():
    most = []
    for seen in (transient_memory_seen_by_profilers(), nullcontext()):
        with seen, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            taken = transient_memory(4 * MIB, torch.float32, CPU)
        most.append(max((event.self_cpu_memory_usage for event in profiler.key_averages()), default=0))
        del taken
    assert most[0] >= 16 * MIB > most[1]


def test_memory_is_lent_again_once_nothing_refers_to_it():
    memory, shape = LentMemory(256), (5, 4)
    first = memory.take(shape, torch.float32, CPU)
    address, row = first.data_ptr(), first[1:].fill_(7.0)
    del first
    with torch.device("meta"):  # as a default device, which is not that of offloaded shards
        other = memory.take(shape, torch.float32, CPU)
    assert other.data_ptr() == address + 128 and row.eq(7.0).all()  # a view still refers to the first
    assert not address <= memory.take((1,), torch.float32, CPU).data_ptr() < address + 256  # it found no room
    del row
    again = memory.take((3, 8), torch.bfloat16, CPU)
    assert again.data_ptr() == address and again.untyped_storage().nbytes() == 48


def test_small_and_too_large_tensors_have_memory_of_their_own():
    memory = LentMemory(256, least_bytes=100)
    lent = memory.take((100,), torch.uint8, CPU)
    sizes = (99, 129, 1000, 0)
    others = [memory.take((size,), torch.uint8, CPU).fill_(1) for size in sizes]
    assert [len(tensor) for tensor in others] == [*sizes] and memory.take(
        (10,), torch.uint8, torch.device("meta")
    ).is_meta
    assert all(not 0 <= tensor.data_ptr() - lent.data_ptr() < 256 for tensor in others[:3])


def test_memory_that_is_dropped_lives_as_long_as_a_loan():
    memory = LentMemory(256)
    lent = memory.take((4,), torch.float32, CPU).fill_(1.0)
    memory.free()
    assert memory.tensors == [] and lent.sum() == 4
    again = memory.take((4,), torch.float32, CPU).zero_()  # new memory: the loan keeps its own
    assert len(memory.tensors) == 1 and lent.sum() == 4 and again.sum() == 0


def test_kept_memory_can_be_freed():
    memory = ReusedMemory(torch.float32, CPU, most_kept={8: 1})
    memory.give_back(memory.take(8))
    assert len(memory.kept) == 1
    memory.free_kept()
    assert memory.kept == []


def test_shared_bytes_leave_a_storage_to_torch():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    shared = shared_bytes(tensor)
    shared[:2] = 7
    assert tensor[0, 0] == 7 * 257 and len(shared) == 12 and len(shared_bytes(torch.empty(0))) == 0
    assert tensor.untyped_storage().resizable()
    kept = shared_bytes(torch.full((MIB,), 3, dtype=torch.uint8))  # of a tensor that nothing else refers to
    assert kept.sum() == 3 * MIB
