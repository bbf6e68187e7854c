"""Direct exchanges between ranks in place of torch's collectives, and units that a part of the ranks keeps whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from core import parallel_state
from core.base.host_memory import LentMemory
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig, finalize_model_grads
from core.distributed.fsdp2 import unit_collectives
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import batches, build, full, gradients, loss_of, toy


class Uneven(nn.Module):
    """A model with parameters that ranks cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"large": (301, 257), "odd": (7, 3), "single": (1,), "second": (300, 260)}.items():
            values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 64.0
            setattr(self, name, nn.Parameter(values))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum((parameter * factor).sum() for parameter in self.parameters())


def _is_gathered_right(options: dict) -> None:
    parallel_state.initialize_model_parallel()
    settings = TorchFullyShardedDataParallelConfig()
    wrapper, whole = TorchFullyShardedDataParallel(object(), settings, Uneven(), **options), Uneven()
    model = wrapper.module
    for asynchronous in (False, True, True):
        handle = model.unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()
        for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(found.float(), expected.to(found.dtype).float())
        model(torch.tensor(2.0, dtype=found.dtype)).backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad.to_local(), torch.full_like(parameter.grad.to_local(), 6.0))


def test_uneven_parameters_arrive_whole():
    run_distributed(_is_gathered_right, 2, {})
    run_distributed(_is_gathered_right, 3, {})


def test_parameters_arrive_in_the_dtype_of_computation():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_distributed(_is_gathered_right, 2, {"mp_policy": policy})


@on_ranks(2)
def test_an_unused_gather_is_forgotten() -> None:
    model, tokens = build("fsdp2", toy()), batches(0)[0]
    with torch.no_grad():
        before = model(tokens)  # which sets FSDP2 up
        model.module.blocks[0].unshard(async_op=True)
        model.engine.parameters.settle()
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)
        assert not torch.equal(model(tokens), before)
        whole = toy()
        for parameter in whole.parameters():
            parameter.mul_(0.5)
        assert torch.equal(model(tokens), whole(tokens))
    dist.barrier()


@on_ranks(4)
def test_gradients_that_torch_divides_are_right() -> None:
    model = build("fsdp2", toy().double())
    loss_of(model, batches(dist.get_rank())[0]).backward()
    model.finish_grad_sync()
    serial = toy().double()
    for rank in range(dist.get_world_size()):
        (loss_of(serial, batches(rank)[0]) / dist.get_world_size()).backward()
    assert_same_sums(gradients(model), gradients(serial), additions=3)


def _trains_in_lent_memory(least_bytes: int) -> tuple[list[torch.Tensor], int]:
    """Returns the parameters after three steps, and the number of gathers and reductions in memory that is kept."""
    take, lent = LentMemory.take, []

    def noting(memory: LentMemory, *arguments: Any) -> torch.Tensor:
        tensor = take(memory, *arguments)
        is_lent = memory._memory is not None and tensor.data_ptr() >= memory._memory.data_ptr()
        lent.append(is_lent and tensor.data_ptr() < memory._memory.data_ptr() + memory._num_bytes)
        return tensor

    with (
        mock.patch.object(unit_collectives, "_NEVER_REUSED_BYTES", least_bytes),
        mock.patch.object(LentMemory, "take", noting),
    ):
        model = build("fsdp2", toy())
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
        for tokens in batches(model.process_group.rank(), 3):
            model.zero_grad_buffer()
            loss_of(model, tokens).backward()
            finalize_model_grads([model])
            optimizer.step()
    is_reported = any(
        tensor is model.engine._lent_memory._memory for tensor in model.engine.held()["gathered parameters"]
    )
    assert is_reported == any(lent)
    return [full(parameter) for parameter in model.module.parameters()], sum(lent)


def test_large_units_share_memory_that_changes_no_number():
    (in_kept, lent), _ = run_distributed(_trains_in_lent_memory, 2, 1)
    (in_own, not_lent), _ = run_distributed(_trains_in_lent_memory, 2, 2**25)
    assert lent > 10 and not_lent == 0 and all(map(torch.equal, in_kept, in_own))


# ---- units that two of four ranks keep whole between forward and backward


@on_ranks(4)
def test_a_forward_before_the_update_changes_nothing() -> None:
    found = []
    for reshard_after_forward in (2, True):
        model = build("fsdp2", toy(), reshard_after_forward=reshard_after_forward)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
        (tokens,) = batches(model.process_group.rank(), 1)
        loss_of(model, tokens).backward()
        finalize_model_grads([model])
        loss_of(model, tokens)  # with a graph that no backward uses
        optimizer.step()
        found.append({name: full(parameter) for name, parameter in model.module.named_parameters()})
    assert_same(*found)
