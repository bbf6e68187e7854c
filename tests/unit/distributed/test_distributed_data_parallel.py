"""What is particular to the replicated wrapper; the contract is tested in `test_data_parallel_base.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.errors import ParallelConfigError
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import CollectiveCounter, batches, build, gradients, loss_of, oracle, toy


def _reduces(bucket_size: int | None, disable_bucketing: bool, average_in_collective: bool) -> int:
    ddp_config = DistributedDataParallelConfig(bucket_size=bucket_size, average_in_collective=average_in_collective)
    model = DistributedDataParallel(object(), ddp_config, toy(), disable_bucketing, process_group=dist.group.WORLD)
    for tokens in batches(dist.get_rank()):
        loss_of(model, tokens).backward()
    with CollectiveCounter() as counter:
        finalize_model_grads([model])
    for name, expected in oracle().items():
        assert torch.equal(gradients(model)[name], expected), name
    return counter.counts["allreduce_"]


@pytest.mark.parametrize("average_in_collective", [False, True])
def test_a_bucket_holds_at_most_bucket_size_elements(average_in_collective):
    elements = sum(p.numel() for p in toy().parameters() if p.requires_grad)
    buckets = -(-elements // 50)
    assert run_distributed(_reduces, 2, 50, False, average_in_collective) == [buckets, buckets]
    assert run_distributed(_reduces, 2, 50, True, average_in_collective) == [1, 1]
    assert run_distributed(_reduces, 2, None, False, average_in_collective) == [1, 1]


def _gradients_are_views() -> None:
    model = build("ddp", toy())
    loss_of(model, batches(0)[0]).backward()
    storages = {p.main_grad.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
    assert len(storages) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model.module.frozen, "main_grad")


def test_main_grads_are_views_of_one_buffer_and_frozen_parameters_have_none():
    run_distributed(_gradients_are_views, 1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_distributed_optimizer": True}, "'optim'"),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, "'optim_grads_params'"),
        ({"overlap_grad_reduce": True}, "overlap_grad_reduce"),
        ({"overlap_param_gather": True}, "overlap_param_gather"),
        ({"num_distributed_optimizer_instances": 2}, r"num_distributed_optimizer_instances \(got 2\)"),
    ],
)
def test_what_replication_cannot_honour_is_refused_by_name(fields, named):
    with pytest.raises(ParallelConfigError, match=named):
        DistributedDataParallel(object(), DistributedDataParallelConfig(**fields), toy())
