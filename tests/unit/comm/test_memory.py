"""Memory of collectives: from the backend where it can register it, as usual elsewhere."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from core.comm import memory
from core.host_memory import passing_memory
from core.warn import warn_once
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, gradients, loss_of, oracle, toy

CPU = torch.device("cpu")


class _Backend:
    """As NCCL's: it allocates, and knows what it has allocated."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(numel)
        return torch.full((numel,), 3.0, dtype=dtype, device=device)


def _allocates_slots_and_gradients_by_the_backend() -> None:
    backend, find = _Backend(), memory.allocator

    def by_the_backend(group: Any, device: torch.device, *, registers: bool) -> memory.Allocate:
        with mock.patch.object(type(group), "_get_backend", lambda *unused: backend):
            made = find(group, device, registers=registers)

        def allocate(*size: Any) -> torch.Tensor:
            with mock.patch.object(type(group), "_get_backend", lambda *unused: backend):
                return made(*size)

        return allocate

    with mock.patch("core.distributed.fully_sharded_data_parallel.allocator", by_the_backend):
        model = build("zero3", toy(), nccl_ub=True)
        slots = len(backend.allocated)
        assert slots == sum(len(slot.parts) for slot in {unit.slot for unit in model.units if unit.slot is not None})
        for index, tokens in enumerate(batches(dist.get_rank())):
            with nullcontext() if index == 2 else model.no_sync():
                loss_of(model, tokens).backward()
        model.finish_grad_sync()
        assert len(backend.allocated) > slots
    found = gradients(model)
    assert all(torch.equal(found[name], value) for name, value in oracle().items())


def test_slots_and_gradients_are_in_memory_of_the_backend():
    run_distributed(_allocates_slots_and_gradients_by_the_backend, 2)


def _warns(kind: str) -> list[str]:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(kind, toy(), nccl_ub=True)
    assert memory.allocator(dist.group.WORLD, CPU, registers=False) is passing_memory
    return [str(warning.message) for warning in caught if "nccl_ub" in str(warning.message)]


def test_a_backend_that_cannot_is_named():
    for kind in ("zero3", "fsdp2"):
        (said,) = run_distributed(_warns, 1, kind)[0]
        assert "nccl_ub is set, but the backend of these ranks on cpu cannot register memory" in said
