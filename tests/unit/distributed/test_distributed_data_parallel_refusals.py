"""What the wrapper on buffers cannot honour, and a backward without it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from core import parallel_state
from core.base.errors import ParallelConfigError, WrapError
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import batches, build, loss_of, toy


def _refuses() -> None:
    world = {"process_group": dist.group.WORLD}
    three = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    with pytest.raises(ParallelConfigError, match="'optim_grads_params'; use wrap_model"):
        DistributedDataParallel(object(), three, toy(), **world)
    per_token = SimpleNamespace(calculate_per_token_loss=True)
    with pytest.raises(ParallelConfigError, match=r"calculate_per_token_loss .* average_in_collective"):
        build("ddp", toy(), config=per_token, average_in_collective=True)
    with pytest.raises(ParallelConfigError, match="num_distributed_optimizer_instances is 2 with a process_group"):
        build("zero1", toy(), num_distributed_optimizer_instances=2)
    parallel_state.initialize_model_parallel()
    for instances, message in (
        (3, "3 does not divide the data-parallel size 2"),
        (2, "is 2, but .* initialised with 1"),
    ):
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, num_distributed_optimizer_instances=instances
        )
        with pytest.raises(ParallelConfigError, match=f"num_distributed_optimizer_instances {message}"):
            DistributedDataParallel(object(), ddp_config, toy())
    module = toy()
    module.blocks[0].gain = nn.Parameter(distribute_tensor(torch.ones(2), parallel_state.get_data_parallel_mesh()))
    with pytest.raises(WrapError, match=r"parameter blocks\.0\.gain is a DTensor"):
        DistributedDataParallel(object(), DistributedDataParallelConfig(), module)


def test_what_buffers_cannot_honour_is_refused_by_name():
    run_distributed(_refuses, 2)


def _refuses_to_compute_in_fp32_in_silence() -> None:
    with pytest.raises(ParallelConfigError, match=r"config\.bf16 is set, but every parameter is fp32"):
        build("ddp", toy(), config=SimpleNamespace(bf16=True))


def test_half_precision_needs_parameters_in_it():
    run_distributed(_refuses_to_compute_in_fp32_in_silence, 1)


def _trains_without_its_wrapper() -> None:
    inner = build("ddp", toy(), config=SimpleNamespace(gradient_accumulation_fusion=False)).module
    gc.collect()
    with pytest.raises(WrapError, match="no longer exists"):
        loss_of(inner, batches(0)[0]).backward()


def test_a_backward_after_the_wrapper_has_gone_is_an_error():
    run_distributed(_trains_without_its_wrapper, 1)
