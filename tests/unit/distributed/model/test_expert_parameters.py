"""Parameters that Megatron-LM marks as an expert's: each keeps its own replicas, and is refused where nothing names
them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ParallelConfigError, ShardstackError
from core.base.parameters import local_part
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.process_groups_config import ProcessGroupCollection
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import synced_last

SETTINGS = {
    "ddp": DistributedDataParallelConfig(),
    "zero1": DistributedDataParallelConfig(use_distributed_optimizer=True),
    "zero2, every micro-batch": DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", reduce_every_micro_batch=True
    ),
    "zero3": FullyShardedDataParallelConfig(),
    "zero3, every micro-batch": FullyShardedDataParallelConfig(reduce_every_micro_batch=True),
    "fsdp2": TorchFullyShardedDataParallelConfig(),
    "fsdp2, every micro-batch": TorchFullyShardedDataParallelConfig(reduce_every_micro_batch=True),
    "fsdp2, torch's collectives": TorchFullyShardedDataParallelConfig(collectives="torch"),
}


def _model() -> nn.Module:
    """Returns a model of one dense layer and one expert's, which has values of its own on each rank."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(dist.get_rank() + 1.0)
    model[1].weight.allreduce = False
    return model


def _refuses(setting: str, groups: dict[str, int], config: dict[str, int], given: bool) -> None:
    parallel_state.initialize_model_parallel(**groups)
    model, ranks = _model(), dist.group.WORLD if given else None
    with pytest.raises(ParallelConfigError, match=r"parameter 1.weight is marked allreduce=False.*expert_model_paral"):
        wrap_model(model, SimpleNamespace(**config), SETTINGS[setting], process_group=ranks)
    assert torch.equal(model[1].weight, torch.full((2, 2), dist.get_rank() + 1.0))
    model[1].weight.allreduce = True
    wrap_model(model, SimpleNamespace(**config), SETTINGS[setting], process_group=ranks)
    parallel_state.destroy_model_parallel()


@on_ranks(2)
def test_an_expert_is_refused_where_nothing_names_its_replicas() -> None:
    for setting in ("ddp", "fsdp2"):
        _refuses(setting, {"expert_model_parallel_size": 2}, {}, True)
    _refuses("ddp", {}, {"expert_model_parallel_size": 2}, False)
    _refuses("ddp", {"expert_tensor_parallel_size": 2}, {}, True)


def _trains(setting: str, sizes: dict[str, int], per_token: bool, given: bool = False) -> None:
    """Each rank multiplies by its rank + 1: an expert's gradient is that of its own replicas alone."""
    parallel_state.initialize_model_parallel(**sizes)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = None
    if given:
        groups = ProcessGroupCollection(
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            expt_dp=parallel_state.get_expert_data_parallel_group(),
        )
    model = _model()
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    wrapped = wrap_model(model, config, SETTINGS[setting], pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0), [wrapped]
    )
    replicas = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
    assert {entry.ranks for entry in wrapped.plan.traffic()} == {world, len(replicas)} - {1}
    for step in range(2):
        wrapped.zero_grad_buffer()
        for x in synced_last(wrapped, [torch.full((1, 2), float(rank + 1))] * 3):
            wrapped(x).sum().backward()
        finalize_model_grads([wrapped], torch.tensor(1.0) if per_token else None)
        if step:
            continue
        factors = [r + 1.0 for r in range(world)]
        # The dense layer maps x to 2 x, and the expert's weight is that of its first replica.
        value = replicas[0] + 1.0
        of_expert = 3 * 2 * sum(factors[r] for r in replicas) / world
        first = {tuple(range(start, world, world // len(replicas))): start + 1.0 for start in range(world)}
        of_dense = 3 * sum(2 * factors[r] * first[_replicas_of(r, first)] for r in range(world)) / world
        norm = 4 * of_dense**2 + sum(
            4 * (3 * 2 * sum(factors[i] for i in own) / world) ** 2
            for own in {_replicas_of(r, first) for r in range(world)}
        )
        updated, found, _ = optimizer.step()
        assert updated and found == pytest.approx(norm**0.5)
        with wrapped.whole_parameters():
            for name, weight in wrapped.module.named_parameters():
                start, gradient = (1.0, of_dense) if name == "0.weight" else (value, of_expert)
                held = local_part(weight.detach())
                torch.testing.assert_close(held, torch.full_like(held, start - gradient), msg=name)


def _replicas_of(rank: int, first: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    return next(own for own in first if rank in own)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_expert_on_one_rank_has_the_mean_over_all(setting, per_token):
    if per_token and "averaged" in setting:
        pytest.skip("sums are not averaged")
    run_distributed(_trains, 2, setting, {"expert_model_parallel_size": 2}, per_token)


@pytest.mark.parametrize("setting", ["ddp", "zero2, every micro-batch", "zero3", "fsdp2"])
def test_an_expert_on_two_ranks_of_four_has_the_mean_over_all(setting):
    run_distributed(_trains, 4, setting, {"expert_model_parallel_size": 2}, False, setting != "fsdp2")


def _adds_up(setting: str, experts: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=experts)
    model = _model()
    wrapped = wrap_model(model, SimpleNamespace(), SETTINGS[setting])
    found = []
    for _ in range(2):
        wrapped(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        finalize_model_grads([wrapped])
        found.append([wrapped.local_gradient(p).clone() for p in model.parameters()])
    for first, second in zip(*found, strict=True):  # small numbers, halved: exact
        assert torch.equal(second, 2 * first), setting


@on_ranks(2)
def test_experts_gradients_add_up_over_steps_or_raise() -> None:
    """An expert's reduced gradient was divided by more ranks than are summed over: to reduce it again is no mean."""
    for setting, experts in (("ddp", 1), ("fsdp2", 1), ("fsdp2", 2)):
        _adds_up(setting, experts)
        parallel_state.destroy_model_parallel()
    for setting in ("ddp", "zero1", "zero3"):
        with pytest.raises(
            ShardstackError, match="a backward added gradients after those of the step had been reduced"
        ):
            _adds_up(setting, 2)
        parallel_state.destroy_model_parallel()


@on_ranks(2)
def test_without_experts_the_mark_changes_nothing() -> None:
    parallel_state.initialize_model_parallel()
    model = _model()
    wrapped = wrap_model(model, SimpleNamespace(), SETTINGS["ddp"])
    model[1].weight.sum().mul(dist.get_rank() + 1.0).backward()
    wrapped.finish_grad_sync()
    assert torch.equal(model[1].weight.main_grad, torch.full((2, 2), 1.5))


class _Block(nn.Sequential):
    pass


@on_ranks(4)
def test_settings_that_experts_cannot_have_are_refused() -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    with pytest.raises(ParallelConfigError, match=r"reproducible_across_ranks .*set expert_model_parallel_size=1"):
        wrap_model(_model(), SimpleNamespace(), DistributedDataParallelConfig(reproducible_across_ranks=True))
    with pytest.raises(ParallelConfigError, match=r"reshard_after_forward is 2 for 1, which has expert parameters"):
        wrap_model(_model(), SimpleNamespace(), FullyShardedDataParallelConfig(reshard_after_forward=2),
                   sub_modules_to_wrap=(nn.Linear,))  # fmt: skip
    selective = TorchFullyShardedDataParallelConfig(activation_checkpointing="selective")
    with pytest.raises(
        ParallelConfigError, match=r"'selective' for a unit around 0.1, experts over ranks, and FSDP2 runs"
    ):
        wrap_model(nn.Sequential(_Block(*_model())), SimpleNamespace(), selective, sub_modules_to_wrap=(_Block,))
