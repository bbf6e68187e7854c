"""Memory of collectives: from the backend where it can register it, as usual elsewhere."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from core.base.device import current_device
from core.base.errors import warn_once
from core.base.host_memory import transient_memory
from core.comm import collectives
from core.comm.record import record_of
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import batches, build, gradients, loss_of, oracle, toy

CPU = torch.device("cpu")


class _Backend:
    """As NCCL's: it allocates, once its group has run a collective."""

    def __init__(self, group: Any, allocated: list[int]) -> None:
        self._group, self._allocated = group, allocated

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not record_of(self._group).num_calls:
            raise dist.DistBackendError("NCCL communicator has not been initialized before mem pool creation")
        self._allocated.append(numel)
        return torch.full((numel,), 3.0, dtype=dtype, device=device)


@on_ranks(2)
def test_buffers_are_allocated_by_the_backend():
    allocated, find = list[int](), collectives.allocator
    twins = WeakKeyDictionary[Any, Any]()  # so that the wrapper reduces in a group that has run nothing yet

    def by_the_backend(group: Any, device: torch.device, *, registers: bool) -> collectives.Allocate:
        record_of(group)  # asks the backend itself for its time limit
        with mock.patch.object(type(group), "_get_backend", lambda *unused: _Backend(group, allocated)):
            result = find(group, device, registers=registers)

        def allocate(*size: Any) -> torch.Tensor:
            with mock.patch.object(type(group), "_get_backend", lambda *unused: _Backend(group, allocated)):
                return result(*size)

        return allocate

    with (
        mock.patch("core.distributed.flat.flat_engine.allocator", by_the_backend),
        mock.patch("core.distributed.groups._twins", twins),
    ):
        model = build("zero3", toy(), nccl_ub=True)
        slots = len(allocated)
        assert slots == sum(
            len(slot.parts) for slot in {unit.slot for unit in model.engine.units if unit.slot is not None}
        )
        for index, tokens in enumerate(batches(dist.get_rank())):
            with nullcontext() if index == 2 else model.no_sync():
                loss_of(model, tokens).backward()
        model.finish_grad_sync()
        assert len(allocated) > slots
    actual = gradients(model)
    assert all(torch.equal(actual[name], value) for name, value in oracle().items())


def _warns(kind: str) -> list[str]:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(kind, toy(), nccl_ub=True)
    assert collectives.allocator(dist.group.WORLD, CPU, registers=False) is transient_memory
    return [str(warning.message) for warning in caught if "nccl_ub" in str(warning.message)]


def test_backend_without_allocator_warns():
    for kind in ("zero3", "fsdp2"):
        (said,) = run_distributed(_warns, 1, kind)[0]
        assert "nccl_ub is set, but the backend of these ranks on cpu cannot register memory" in said


def _gradients_of_one_rank(registers: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Returns gradients that went through slots and the backend, and whether it allocated the memory, of each use."""
    by_the_backend: list[bool] = []

    def noted(*args: Any, **options: Any) -> collectives.Allocate:
        found = collectives.allocator(*args, **options)
        by_the_backend.append(found is not transient_memory)
        return found

    with (
        mock.patch("core.distributed.flat.flat_engine.allocator", noted),
        collectives.SKIPS_GROUPS_OF_ONE.replaced(False),
    ):
        model = build("zero3", toy().to(current_device()), param_dtype=torch.bfloat16, nccl_ub=registers)
        for index, tokens in enumerate(batches(0)):
            with nullcontext() if index == 2 else model.no_sync():
                loss_of(model, tokens.to(current_device())).backward()
        model.finish_grad_sync()
        return gradients(model), by_the_backend


def _the_backends_memory_changes_no_number() -> bool:
    """Returns whether the backend allocated."""
    warn_once.cache_clear()
    expected, usual = _gradients_of_one_rank(registers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, by_the_backend = _gradients_of_one_rank(registers=True)
    assert_same(found, expected)
    can = collectives.can_register(dist.group.WORLD, current_device())
    assert not any(usual) and by_the_backend == [can] * len(usual) and len(usual) >= 2
    assert can != any("cannot register memory" in str(warning.message) for warning in caught)
    return can


def test_gloo_uses_default_memory() -> None:
    assert run_distributed(_the_backends_memory_changes_no_number, 1) == [False]


@pytest.mark.gpu
@needs_gpu
def test_memory_of_nccl_changes_no_number() -> None:
    with one_rank_on_a_gpu():
        _the_backends_memory_changes_no_number()


@pytest.mark.gpu
@needs_gpu
def test_nccl_uses_registered_memory() -> None:
    with one_rank_on_a_gpu():
        group, here = dist.group.WORLD, current_device()
        allocate = collectives.allocator(group, here, registers=True)
        whole, part = (allocate(1 << 20, torch.bfloat16, here) for _ in range(2))
        assert (whole.shape, whole.dtype, whole.device) == ((1 << 20,), torch.bfloat16, here)
        part.copy_(torch.arange(1 << 20, device=here).remainder(256))
        with collectives.SKIPS_GROUPS_OF_ONE.replaced(False):
            collectives.all_gather(whole, part, group, what="the parameters")
            collectives.all_reduce(whole, group, what="the gradients")
        assert torch.equal(whole, part)
