"""Groups are found once, when a model is wrapped. What follows takes them from the plan, with or without a state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state, process_groups
from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
from core.distributed.groups import find_groups, twin_group
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.process_groups_config import ProcessGroupCollection
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Stack, build


def _alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@on_ranks(2)
def test_given_groups_come_first_and_the_state_has_the_rest() -> None:
    world, alone = dist.group.WORLD, _alone()
    given = ProcessGroupCollection(dp_cp=alone, tp=world)
    model = find_groups("test", 1, pg_collection=given).model
    assert (model.tp, model.pp, model.experts_are_apart) == (world, None, False)
    given.tp = alone  # later changes of the caller's object
    assert model.tp is world
    assert find_groups("test", 1, world).model.tp is None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    for groups in (find_groups("test", 1), find_groups("test", 1, alone)):
        assert (groups.model.tp, groups.model.pp) == (tp, pp)
    model = find_groups("test", 1, pg_collection=ProcessGroupCollection(dp_cp=alone, tp=world)).model
    assert (model.tp, model.pp) == (world, pp)


class _Stage(nn.Module):
    """A pipeline stage, which counts tokens only where it is the last."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.weight, self.post_process = nn.Parameter(torch.full((3,), 2.0)), is_last
        self.weight.shared_embedding = True

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@on_ranks(2)
def test_stages_of_given_groups_are_one_model(strategy: str) -> None:
    rank, world, alone = dist.get_rank(), dist.group.WORLD, _alone()
    groups = ProcessGroupCollection(dp_cp=alone, pp=world, embd=world, mp=world)
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    config = SimpleNamespace(calculate_per_token_loss=True)
    model = wrap_model(_Stage(rank == 1), config, settings, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0), [model])
    model.zero_grad_buffer()
    model(torch.full((3,), rank + 1.0)).sum().backward()  # gradients of 1 and 2, whose sum is 3
    finalize_model_grads([model], num_tokens=4 if rank == 1 else 100)  # of the last stage
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx((2 * 3 * 0.75**2) ** 0.5)  # of both stages, none of which is marked as a copy
    assert torch.equal(model.module.weight, torch.full((3,), 2.0 - 0.75))


@on_ranks(2)
def test_a_step_does_not_ask_for_the_state_again() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    module = nn.Linear(2, 2, bias=False)
    module.weight.sequence_parallel = True
    model = wrap_model(module, None, DistributedDataParallelConfig())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0), [model])
    groups = process_groups.groups_or_none()
    process_groups.set_groups(None)  # as if it were another model's
    try:
        model(torch.ones(1, 2) * (dist.get_rank() + 1)).sum().backward()
        finalize_model_grads([model])
        assert torch.equal(model.module.weight.main_grad, torch.full((2, 2), 3.0))
        assert optimizer.step()[1] == 6.0  # which both ranks hold, and one counts
    finally:
        process_groups.set_groups(groups)


@on_ranks(2)
def test_a_group_has_one_twin_of_the_same_ranks() -> None:
    world = dist.group.WORLD
    twin = twin_group(world)
    assert twin is not world and twin is twin_group(world)
    assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(world)


@on_ranks(2, limit_s=90.0)
def test_a_group_of_some_ranks_made_earlier_is_no_hang() -> None:
    dist.new_group([0])  # every rank calls it, as torch asks
    model = build("zero3", Stack(layers=2), unit_classes=(nn.Linear,), group=dist.new_group([0, 1]))
    model(torch.ones(2, 6)).sum().backward()
    model.finish_grad_sync()


@on_ranks(2)
def test_groups_of_some_ranks_leave_torchs_count_alone() -> None:
    ranks, number = dist.get_process_group_ranks(dist.group.WORLD), dist.distributed_c10d.get_pg_count()
    alone = _alone()
    if dist.get_rank() == 1:
        assert dist.get_process_group_ranks(twin_group(alone)) == [1]
        assert dist.distributed_c10d.get_pg_count() == number + 2  # those of `_alone`
    twin, again = twin_group(dist.group.WORLD), twin_group(twin_group(dist.group.WORLD))
    after = dist.new_group(ranks)  # torch names it by its count
    for group in (twin, again, after):
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        assert total == 2
    assert len({group.group_name for group in (dist.group.WORLD, twin, again, after)}) == 4
