"""Buffers and bucket groups as Megatron-LM's scripts use them: their attributes, and calls without the wrapper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ParallelConfigError, ShardstackError
from core.comm.lane import LANES
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, TorchFullyShardedDataParallel
from core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import synced_last

PATTERNS = "param_name_patterns_for_fp32_local_accumulation"


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def _wrapped(model: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    return DistributedDataParallel(SimpleNamespace(), DistributedDataParallelConfig(**settings), model or _model())


@on_ranks(2)
def test_only_sharded_buffers_are_aligned() -> None:
    sizes = [3, 21, 7, 35]  # in reverse order of construction
    (replicated,) = _wrapped().buffers
    assert replicated.numel == replicated.grad_data.numel() == sum(sizes)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    assert [end for _, end, _ in replicated.param_index_map.values()] == ends
    (sharded,) = _wrapped(use_distributed_optimizer=True).buffers
    assert [start for start, _, _ in sharded.param_index_map.values()] == [0, 64, 128, 192]
    assert max(end for _, end, _ in sharded.param_index_map.values()) == 192 + 35 and sharded.numel == 256


@on_ranks(2)
def test_the_wrapper_sends_an_incomplete_bucket() -> None:
    model = _wrapped(overlap_grad_reduce=True)
    model.module[2].weight.sum().backward()
    model.finish_grad_sync()
    gradients = [param.main_grad.sum().item() for param in model.parameters()]
    assert gradients == [0.0, 0.0, 21.0, 0.0]


@on_ranks(2)
def test_main_grad_written_before_the_first_backward_counts() -> None:
    model = _wrapped()
    for param in model.parameters():
        param.main_grad.fill_(2.0 * dist.get_rank())
    model(torch.ones(1, 5)).sum().backward()
    model.finish_grad_sync()
    assert torch.equal(model.module[2].bias.main_grad, torch.full((3,), 2.0))  # 1 from backward, the mean of 0 and 2


def _gradients(patterns: tuple[str, ...], **settings: Any) -> dict[str, torch.Tensor]:
    """Returns gradients of eight micro-batches in bf16, which a bf16 sum would round each time."""
    model = _wrapped(_model(torch.bfloat16), **{PATTERNS: patterns}, **settings)
    data = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    for _ in range(2):  # the second step begins after zero_grad_buffer
        model.zero_grad_buffer()
        for batch in synced_last(model, data):
            model(batch).square().sum().backward()
        model.finish_grad_sync()
        model.scale_gradients(0.5)
    found = {name: model.local_gradient(param).clone() for name, param in model.module.named_parameters()}
    by_name = dict(model.module.named_parameters())
    if not settings:
        for name, param in by_name.items():
            if name in patterns or "all" in patterns or (patterns and name.endswith(".weight")):
                assert param.main_grad.dtype == torch.float32
                copy = param.main_grad_copy_in_grad_buffer
                assert copy.dtype == torch.bfloat16 and torch.equal(copy.float(), param.main_grad)
            else:
                assert param.main_grad.dtype == torch.bfloat16 and not hasattr(param, "main_grad_copy_in_grad_buffer")
    return found


def _expected(size: int) -> dict[str, torch.Tensor]:
    """Returns micro-batches added in fp32, rounded once on each rank, and ranks added in bf16 in rank order."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(size):
        data = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(rank)).bfloat16()
        model = _model(torch.bfloat16)
        local = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in model.named_parameters()}
        for batch in data:
            model.zero_grad()
            model(batch).square().sum().backward()
            for name, param in model.named_parameters():
                local[name] += param.grad
        for name, gradient in local.items():
            total[name] = total[name] + gradient.bfloat16() if rank else gradient.bfloat16()
    return {name: gradient / (2 * size) for name, gradient in total.items()}  # 2 ranks: halves are exact


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap_grad_reduce": True}, {"use_distributed_optimizer": True}]
    + [{"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 20}],
    ids=["ddp", "ddp_overlap", "zero1", "zero2"],
)
@on_ranks(2)
def test_gradients_of_some_parameters_add_up_in_fp32(settings: dict[str, Any]) -> None:
    expected, plain = _expected(2), _gradients((), **settings)
    every, weights = _gradients(("all",), **settings), _gradients(("*.weight",), **settings)
    whole = {name: gradient.flatten() for name, gradient in expected.items()}
    assert any(not torch.equal(plain[name].float(), every[name].float()) for name in plain), "rounding shows"
    for name, gradient in every.items():
        length = gradient.numel()
        parts = [whole[name][start : start + length] for start in range(len(whole[name]) - length + 1)]
        assert any(torch.equal(gradient.flatten().bfloat16(), part) for part in parts), name
        assert torch.equal(weights[name], gradient if name.endswith("weight") else plain[name])


@on_ranks(2)
def test_gradients_in_fp32_memory_are_for_our_optimizers() -> None:
    model = _wrapped(_model(torch.bfloat16), **{PATTERNS: ("*.weight",)})
    (buffer,) = model.buffers
    weights = [param for param in model.parameters() if param.dim() == 2]
    assert [param.main_grad is not None and param.main_grad.dtype for param in weights] == [torch.float32] * 2
    assert [tuple(gradient.shape) for gradient in buffer.buckets[0].grads.accumulators] == [(3, 7), (7, 5)]
    model(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
    model.finish_grad_sync()
    with pytest.raises(ShardstackError, match=r"a gradient was read from param.grad.*keeps it in another dtype"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, bf16=True), [model])
    assert optimizer.step()[0]
    fsdp2 = DistributedDataParallelConfig(**{PATTERNS: ("all",)})
    with pytest.raises(ParallelConfigError, match=f"{PATTERNS} is .*adds up gradients in fp32.*FSDP2 cannot"):
        TorchFullyShardedDataParallel(SimpleNamespace(), fsdp2, _model())


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@on_ranks(2)
def test_marked_parameters_have_own_buffers_and_equal_updates(strategy: str) -> None:
    model = _model()
    for param in model[2].parameters():
        param.allreduce = False
    settings = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
    layout = None
    if strategy == "optim":
        config = DistributedDataParallelConfig(**settings)
        layout = DistributedOptimizer.compute_full_param_layout(list(model.parameters()), None, 2, config)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    wrapped = DistributedDataParallel(
        SimpleNamespace(), DistributedDataParallelConfig(**settings), model, full_param_layout=layout
    )
    (dense,), (expert,) = wrapped.buffers, wrapped.expert_parallel_buffers
    assert set(dense.param_index_map) == set(model[0].parameters())
    assert set(expert.param_index_map) == set(model[2].parameters())
    assert [group.buckets for group in wrapped.bucket_groups] == [dense.buckets]
    assert [group.buckets for group in wrapped.expert_parallel_bucket_groups] == [expert.buckets]
    plain = _wrapped(**settings)
    for candidate in (wrapped, plain):
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [candidate])
        candidate(torch.full((2, 5), dist.get_rank() + 1.0)).square().sum().backward()
        candidate.finish_grad_sync()
        assert optimizer.step()[0]
    assert all(map(torch.equal, wrapped.parameters(), plain.parameters()))


@on_ranks(2)
def test_gathers_are_waited_for() -> None:
    lane = mock.Mock()
    with LANES.replaced(lambda *place: lane):
        model = _wrapped(use_distributed_optimizer=True, overlap_param_gather=True)
        model.start_param_sync()
    lane.submit.return_value.wait.assert_not_called()
    model.free_overlap_buffers()
    lane.submit.return_value.wait.assert_called_once()
