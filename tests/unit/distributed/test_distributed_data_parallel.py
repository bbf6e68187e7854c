"""What is particular to the wrapper on buffers: ZeRO-2, hybrids and precision.

The contract of all wrappers is in `test_data_parallel_base.py`, how gradients arrive in `flat/test_flat_engine.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ParallelConfigError, ShardstackError
from core.distributed import DistributedDataParallel, finalize_model_grads, wrap_model
from core.distributed.flat.bucket import Bucket
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import accumulate, batches, build, full, gradients, loss_of, oracle, settings, toy

# ---- ZeRO-2


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
@pytest.mark.parametrize("kind", ["zero2", "zero2_overlap"])
@on_ranks(2)
def test_whole_gradients_live_until_they_are_reduced(kind: str, every: bool) -> None:
    model = build(kind, toy(tied=False), reduce_every_micro_batch=every)
    most = 0

    def held() -> int:
        return sum(group.grad_data is not None for group in model.bucket_groups)

    def watch(group: Bucket) -> None:
        nonlocal most
        most = max(most, held())
        start(group)

    start = Bucket.start_grad_sync
    with mock.patch.object(Bucket, "start_grad_sync", watch):
        for _ in range(2):
            model.zero_grad_buffer()
            for index, tokens in enumerate(batches(dist.get_rank())):
                with nullcontext() if index == 2 else model.no_sync():
                    loss_of(model, tokens).backward()
                assert held() == (0 if every or index == 2 else len(model.bucket_groups))
                if not every and index < 2:  # shards are not needed yet
                    assert all(group.grads.separate_shard is None for group in model.bucket_groups)
            finalize_model_grads([model])
            assert all(getattr(p, "main_grad", None) is None for p in model.parameters())
    if every:  # two ranks are added first, three micro-batches afterwards
        assert_same_sums(gradients(model), oracle(tied=False), additions=5)
    else:
        assert_same(gradients(model), oracle(tied=False))
    if every and len(model.bucket_groups) > 1:
        assert most <= 2 < len(model.bucket_groups)


@on_ranks(2)
def test_force_all_reduce_leaves_whole_gradients() -> None:
    for kind in ("ddp", "zero1", "zero1_overlap", "zero2"):
        model = build(kind, toy())
        accumulate(model)
        if kind == "zero2":
            with pytest.raises(ShardstackError, match="force_all_reduce asks for whole gradients"):
                model.finish_grad_sync(force_all_reduce=True)
            continue
        model.finish_grad_sync(force_all_reduce=True)
        found = {name: p.main_grad for name, p in model.module.named_parameters() if p.requires_grad}
        assert_same(found, {name: g for name, g in oracle().items() if name != "head.weight"})


# ---- hybrid


@pytest.mark.parametrize(("kind", "every"), [("zero1", False), ("zero2_overlap", False), ("zero2_overlap", True)])
@on_ranks(4)
def test_hybrid_shards_in_an_instance_and_replicates_across(kind: str, every: bool) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp_config = settings(kind, num_distributed_optimizer_instances=2, reduce_every_micro_batch=every)
    model = DistributedDataParallel(SimpleNamespace(), ddp_config, toy())
    for _ in range(2):
        model.zero_grad_buffer()
        accumulate(model)
        model.finish_grad_sync()
        # Three micro-batches of four ranks. Those within an instance are added first, instances afterwards: another
        # order than the oracle's.
        assert_same_sums(gradients(model), oracle(world_size=4), additions=11)
    with torch.no_grad():
        for group in model.bucket_groups:
            group.local_param_shard.fill_(dist.get_rank())
    model.start_param_sync(force_sync=True)
    held = {int(value) for p in model.parameters() if p.requires_grad for value in full(p).unique()}
    assert held == ({0, 1} if dist.get_rank() < 2 else {2, 3})


# ---- precision


@on_ranks(2)
def test_fp16_is_scaled_before_it_is_added() -> None:
    model = build("ddp", nn.Linear(1, 1, bias=False).half())
    (model.module.weight * 40_000.0).sum().backward()  # twice that is more than fp16 holds
    model.finish_grad_sync()
    assert model.module.weight.main_grad.item() == 40_000.0


@pytest.mark.parametrize("kind", ["zero1", "fsdp2"])
@on_ranks(2)
def test_instances_must_be_those_of_the_process_groups(kind: str) -> None:
    with pytest.raises(ParallelConfigError, match="num_distributed_optimizer_instances is 2 with a process_group"):
        build(kind, toy(), num_distributed_optimizer_instances=2)
    parallel_state.initialize_model_parallel()
    for instances in (3, 2):
        ddp_config = settings(kind, num_distributed_optimizer_instances=instances)
        message = f"num_distributed_optimizer_instances is {instances}, but .* initialised with 1"
        with pytest.raises(ParallelConfigError, match=message):
            wrap_model(toy(), SimpleNamespace(), ddp_config)
