"""The distributed optimizer: chosen by the wrapper, holds each element's state once, and takes what others take."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.base.errors import ConfigError, OptimizerError
from core.dist_checkpointing import FlatRange
from core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import DistributedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.main_ranges import MainRange
from tests.unit._spawn import on_ranks

STRATEGIES = ("optim", "optim_grads")


class Model(nn.Module):
    """Two ranks' shares end inside `wide`; each has parameters that the other holds nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.wide = nn.Parameter(torch.randn(3, 7, 11))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b, 5]` to a scalar."""
        return (self.first(x) @ self.wide.flatten(1) * self.scale).square().mean()


def _build(
    strategy: str, dtype: torch.dtype = torch.float32, optimizer: dict[str, Any] | None = None, **fields: Any
) -> tuple[nn.Module, Any, MegatronOptimizer]:
    torch.manual_seed(0)
    module = Model().to(dtype)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, **fields)
    group = None if parallel_state.is_initialized() else dist.group.WORLD
    model = wrap_model(module, None, ddp_config, process_group=group)
    return module, model, get_megatron_optimizer(OptimizerConfig(lr=0.1, **(optimizer or {})), [model])


def _backward(model: Any, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype
    model.zero_grad_buffer()
    model(torch.randn(4, 5, generator=generator).to(dtype)).backward()
    finalize_model_grads([model])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_norm_and_zeros_exclude_padding(strategy: str):
    measured = []
    for chosen in (strategy, "no_shard"):
        module, model, optimizer = _build(chosen, optimizer={"log_num_zeros_in_grad": True})
        model.zero_grad_buffer()
        model(torch.zeros(4, 5)).backward()  # `first.weight` gets zeros alone
        finalize_model_grads([model])
        if chosen == "no_shard":
            grads = [p.main_grad for p in module.parameters() if p.requires_grad]
            norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
            zeros = sum(int((g == 0).sum()) for g in grads)
        measured.append(optimizer.step())
    assert zeros >= 15
    assert measured[0] == (True, pytest.approx(norm, rel=1e-7), zeros)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_overflow_in_one_shard_skips_on_all_ranks(strategy: str):
    options = {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1}
    module, model, optimizer = _build(strategy, torch.float16, options, grad_reduce_in_fp32=True)
    _backward(model)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    mine = next(p for p in optimizer._params if p.main.numel())
    if dist.get_rank() == 1:
        gradient = mine.local_gradient()
        assert gradient is not None
        gradient[0] = math.inf
    result = optimizer.step()
    untouched = all(torch.equal(before[name], p) for name, p in module.named_parameters())
    _backward(model, 1)
    rank = {
        "skipped": result,
        "untouched": untouched,
        "scale": optimizer.get_loss_scale().item(),
        "then": optimizer.step()[0],
        "step": optimizer.state_scalars()["step"],
    }
    assert rank == {"skipped": (False, None, None), "untouched": True, "scale": 4.0, "then": True, "step": 1}


@on_ranks(2)
def test_a_state_dict_waits_for_the_gather():
    _, plain, reference = _build("no_shard")
    module, model, optimizer = _build("optim", overlap_param_gather=True, bucket_size=16)
    same = True
    for step in range(3):
        for each, of_each in ((plain, reference), (model, optimizer)):
            _backward(each, step)
            of_each.step()
        actual, expected = module.state_dict(), plain.state_dict()
        same = same and all(torch.equal(actual[name], expected[name]) for name in expected)
    assert same


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_masters_follow_written_parameters(strategy: str):
    module, _, optimizer = _build(strategy, torch.bfloat16, {"bf16": True})
    for tensor in (t for name, t in optimizer.state_tensors().items() if name.startswith("master.")):
        tensor.elements.fill_(3.0)
    optimizer.load_state_scalars(optimizer.state_scalars())
    published = all(bool((p == 3.0).all()) for p in module.parameters() if p.requires_grad)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(0.5)
    optimizer.reload_model_params()
    held = [p.main for p in optimizer._params]
    assert published and all(bool((main == 0.5).all()) for main in held) and any(len(main) for main in held)


@on_ranks(2)
def test_this_ranks_state_dict_continues_it():
    module, model, optimizer = _build("optim")
    for step in range(2):
        _backward(model, step)
        optimizer.step()
    again, rebuilt, resumed = _build("optim")
    again.load_state_dict(module.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, of_each in ((model, optimizer), (rebuilt, resumed)):
        _backward(each, 2)
        of_each.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), again.parameters(), strict=True))


def _message(fn: Any, *args: Any) -> str:
    with pytest.raises((ConfigError, OptimizerError)) as caught:
        fn(*args)
    return str(caught.value)


@on_ranks(2)
def test_settings_that_contradict_the_wrapper_are_refused():
    module, model, _ = _build("optim")
    group = dist.group.WORLD
    replicated = wrap_model(Model(), None, DistributedDataParallelConfig(), process_group=group)
    fsdp2 = wrap_model(Model(), None, TorchFullyShardedDataParallelConfig(), process_group=group)
    wants, refuses = (OptimizerConfig(lr=0.1, use_distributed_optimizer=flag) for flag in (True, False))
    assert type(get_megatron_optimizer(wants, [model])) is DistributedOptimizer
    assert type(get_megatron_optimizer(refuses, [replicated])) is MegatronOptimizer
    assert type(get_megatron_optimizer(refuses, [fsdp2])) is MegatronOptimizer
    actual = {
        "wanted": _message(get_megatron_optimizer, wants, [replicated]),
        "refused": _message(get_megatron_optimizer, refuses, [model]),
        "fsdp2": _message(get_megatron_optimizer, wants, [fsdp2]),
        "bare": _message(get_megatron_optimizer, wants, [Model()]),
        "mixed": _message(get_megatron_optimizer, OptimizerConfig(lr=0.1), [model, replicated]),
        "inside": _message(get_megatron_optimizer, OptimizerConfig(lr=0.1), [module]),
    }
    module.frozen.requires_grad_(True)
    actual["unfrozen"] = _message(get_megatron_optimizer, OptimizerConfig(lr=0.1), [model])
    assert "use_distributed_optimizer is True" in actual["wanted"]
    assert "data_parallel_sharding_strategy is no_shard" in actual["wanted"]
    assert "use_distributed_optimizer is False" in actual["refused"]
    assert "data_parallel_sharding_strategy is optim " in actual["refused"]
    assert "data_parallel_sharding_strategy is optim_grads_params" in actual["fsdp2"]
    assert "data_parallel_sharding_strategy is no_shard" in actual["bare"]
    assert "different strategies, no_shard, optim" in actual["mixed"]
    assert "parameter first.weight belongs to a model whose wrapper shards" in actual["inside"] or (
        "parameter wide belongs to a model whose wrapper shards" in actual["inside"]
    )
    assert "parameter frozen is in none of the wrapper's buffers" in actual["unfrozen"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world_size", "instances"), [(3, 1), (4, 2)])
@on_ranks("world_size")
def test_updated_ranges_and_state_follow_the_plan(strategy: str, world_size: int, instances: int):
    if instances > 1:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    options = {"bucket_size": 60, "num_distributed_optimizer_instances": instances}
    dtype = torch.bfloat16 if instances > 1 else torch.float32
    module, model, optimizer = _build(strategy, dtype, {"bf16": instances > 1}, **options)
    plan = model.plan
    assert plan.shard_index == dist.get_rank() % plan.num_shards
    shards = [bucket.local_param_shard for buffer in model.buffers for bucket in buffer.buckets]
    places = [range(s.data_ptr(), s.data_ptr() + s.nbytes, s.element_size()) for s in shards]
    held = 0
    for p in optimizer._params:
        assert isinstance(p, MainRange)
        begin, end = plan.trained_params[p.name].bounds[plan.shard_index : plan.shard_index + 2]
        assert (p.start, p.end) == (begin, end) and p.main.numel() == end - begin
        in_place = any(p.main.data_ptr() in place for place in places)
        assert p.main.numel() == 0 or in_place == (dtype == torch.float32)  # else a master of its own
        assert torch.equal(p.main, module.get_parameter(p.name).flatten()[begin:end].float())
        assert p.local_gradient() is None  # nothing was reduced yet
        held += p.main.numel()
    assert held > 0
    _backward(model)
    for p in optimizer._params:
        assert p.local_gradient().shape == p.main.shape
    optimizer.step()
    kinds = ("exp_avg", "exp_avg_sq", "master") if dtype == torch.bfloat16 else ("exp_avg", "exp_avg_sq")
    state = optimizer.state_tensors()
    assert sorted(state) == sorted(f"{kind}.{p.name}" for p in optimizer._params for kind in kinds)
    for p in optimizer._params:
        for tensor in (state[f"{kind}.{p.name}"] for kind in kinds):
            assert isinstance(tensor, FlatRange) and tensor.dtype == torch.float32
            assert tensor.shape == module.get_parameter(p.name).shape and len(tensor.elements) == p.main.numel()
