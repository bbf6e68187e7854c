"""Gathers without copies: what they bring, what they do not do, and where torch's own way is taken."""

import threading
import time
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from core import parallel_state
from core.comm import collectives
from core.distributed.fsdp2.collectives import DirectAllGather
from core.distributed.fsdp2.torch_private import (
    PendingReductions,
    drop_pending_gathers,
    exchange_directly,
    gathered_tensors,
)
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, gradients, loss_of, oracle, toy


class Uneven(nn.Module):
    """A model with parameters that ranks cut unevenly, some of them small enough to share a message."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"large": (301, 257), "odd": (7, 3), "single": (1,), "second": (300, 260)}.items():
            values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 64.0
            setattr(self, name, nn.Parameter(values))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum((parameter * factor).sum() for parameter in self.parameters())


def _sharded(**options) -> Uneven:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    model = fully_shard(Uneven(), mesh=parallel_state.get_data_parallel_mesh(), **options)
    model.set_custom_all_gather(DirectAllGather("the root unit"))
    exchange_directly(model, PendingReductions())
    return model


def copies_counted():
    return mock.patch.object(torch.ops.fsdp, "split_with_sizes_copy", wraps=torch.ops.fsdp.split_with_sizes_copy)


def _is_gathered_right(options: dict) -> int:
    """Returns the number of copies that torch made on the way."""
    model, whole = _sharded(**options), Uneven()
    with copies_counted() as copies:
        for asynchronous in (False, True, True):
            handle = model.unshard(async_op=asynchronous)
            if asynchronous:
                handle.wait()
            for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(found.float(), expected.to(found.dtype).float())
            model(torch.tensor(2.0, dtype=found.dtype)).backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad.to_local(), torch.full_like(parameter.grad.to_local(), 6.0))
    return copies.call_count


def test_parameters_arrive_whole_without_torchs_copies():
    assert run_distributed(_is_gathered_right, 2, {}) == [0, 0]
    assert run_distributed(_is_gathered_right, 3, {}) == [0, 0, 0]


def test_they_arrive_in_the_dtype_of_computation():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert run_distributed(_is_gathered_right, 2, {"mp_policy": policy}) == [0, 0]


def _on_the_last_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


class Even(Uneven):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))


def _cut_elsewhere() -> int:
    parallel_state.initialize_model_parallel()
    mesh = parallel_state.get_data_parallel_mesh()
    model = fully_shard(Even(), mesh=mesh, shard_placement_fn=_on_the_last_dimension)
    model.set_custom_all_gather(DirectAllGather("the root unit"))
    exchange_directly(model, PendingReductions())
    with copies_counted() as copies:
        model.unshard()
    assert torch.equal(model.weight, Even().weight)
    return copies.call_count


def test_what_is_cut_on_another_dimension_takes_torchs_way():
    assert run_distributed(_cut_elsewhere, 2) == [1, 1]


def _is_dropped() -> None:
    model = _sharded()
    with torch.no_grad():
        model(torch.tensor(1.0))  # which sets FSDP2 up
    model.reshard()
    model.unshard(async_op=True)
    assert any(tensor.untyped_storage().nbytes() for tensor in gathered_tensors(model))
    drop_pending_gathers(model)
    assert not any(tensor.untyped_storage().nbytes() for tensor in gathered_tensors(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1.0)
        expected = sum((p + 1.0).double().sum() for p in Uneven().parameters())
        assert torch.isclose(model(torch.tensor(1.0)).double(), expected, rtol=1e-5)
    dist.barrier()


def test_an_unused_gather_is_freed_and_forgotten():
    run_distributed(_is_dropped, 2)


def _reduces_in(settings: dict) -> set[str]:
    """Returns the threads in which units are reduced, slowly; gradients have to be right as soon as backward
    returns."""
    threads = []
    reduce_scatter = collectives.reduce_scatter

    def slow(output, *args, **options):
        time.sleep(0.02)
        threads.append(threading.current_thread().name)
        reduce_scatter(output, *args, **options)

    with mock.patch.object(collectives, "reduce_scatter", slow):
        model = build("fsdp2", toy(), **settings)
        for index, tokens in enumerate(batches(dist.get_rank())):
            with nullcontext() if index == 2 else model.no_sync():
                loss_of(model, tokens).backward()
    assert_same_sums(gradients(model), oracle(), additions=5)  # three micro-batches of two ranks, in whichever order
    return set(threads)


def test_units_are_reduced_during_backward_and_done_at_its_end():
    assert run_distributed(_reduces_in, 2, {}) == [{"comm-lane"}] * 2


def _reduces_in_double() -> set[str]:
    """Returns the threads in which units of a model in fp64 are reduced; torch divides their gradients itself."""
    threads = []
    reduce_scatter = collectives.reduce_scatter

    def noting(output, *args, **options):
        threads.append(threading.current_thread().name)
        reduce_scatter(output, *args, **options)

    with mock.patch.object(collectives, "reduce_scatter", noting):
        model = build("fsdp2", toy().double())
        loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    serial = toy().double()
    for rank in range(dist.get_world_size()):
        (loss_of(serial, batches(rank)[0]) / dist.get_world_size()).backward()
    assert_same_sums(gradients(model), gradients(serial), additions=3)
    return set(threads)


def test_gradients_that_torch_divides_are_waited_for():
    assert run_distributed(_reduces_in_double, 4) == [{"MainThread"}] * 4


def test_what_is_computed_with_a_reduction_waits_for_it():
    every = run_distributed(_reduces_in, 2, {"reduce_every_micro_batch": True})
    assert every == [{"comm-lane", "MainThread"}] * 2  # what comes second is added to what is there
    assert run_distributed(_reduces_in, 2, {"cpu_offload": True}) == [{"MainThread"}] * 2
