"""What is particular to the wrapper on buffers; the contract is tested in `test_data_parallel_base.py`."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ShardstackError
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.engine.bucket import Bucket
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import RankFailure, run_distributed
from tests.unit.distributed._scenarios import SCENARIOS, serial_gradients, wrapped_gradients
from tests.unit.distributed._toys import BUFFERED, accumulate, batches, build, full, gradients, loss_of, oracle, toy

OVERLAPPING = [kind for kind in BUFFERED if kind.endswith("overlap")]


# ---- however gradients arrive


def _equals_the_serial_run(kind: str, name: str) -> None:
    for step, found in enumerate(wrapped_gradients(kind, SCENARIOS[name])):
        assert_same(found, serial_gradients(SCENARIOS[name], step))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", BUFFERED)
def test_however_gradients_arrive_they_are_the_serial_ones(kind, scenario):
    run_distributed(_equals_the_serial_run, 2, kind, scenario)


def _sends_incomplete_buckets() -> None:
    with mock.patch.object(Bucket, "is_complete", True):
        model = build("ddp_overlap", toy())
        accumulate(model)
        model.finish_grad_sync()


def test_a_bucket_sent_before_its_gradients_would_be_noticed():
    with pytest.raises(RankFailure, match="a backward added gradients after"):
        run_distributed(_sends_incomplete_buckets, 2)


def _layers_add_themselves(kind: str) -> None:
    config = SimpleNamespace(gradient_accumulation_fusion=True)
    model = build(kind, toy(tied=False), config=config)
    weight = model.module.head.weight
    for _ in range(2):
        model.zero_grad_buffer()
        assert not weight.main_grad.any()
        hook = weight.register_hook(lambda gradient: _add_here(weight, gradient))
        accumulate(model)
        hook.remove()
        finalize_model_grads([model])
        assert_same(gradients(model), oracle(tied=False))
        assert not weight.grad_added_to_main_grad


def _add_here(weight: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    weight.main_grad.add_(gradient)
    weight.grad_added_to_main_grad = True
    return torch.full_like(gradient, float("nan"))  # what the wrapper must not add


@pytest.mark.parametrize("kind", BUFFERED)
def test_a_gradient_that_a_layer_has_added_itself_is_respected(kind):
    run_distributed(_layers_add_themselves, 2, kind)


def _takes_a_late_gradient(kind: str) -> str:
    model = build(kind, toy())
    accumulate(model)
    loss_of(model, batches(0)[0]).backward()
    with pytest.raises(ShardstackError) as error:
        model.finish_grad_sync()
    model.zero_grad_buffer()
    accumulate(model)
    model.finish_grad_sync()
    assert_same(gradients(model), oracle())
    return str(error.value)


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_gradient_after_its_bucket_is_an_error_naming_no_sync(kind):
    for message in run_distributed(_takes_a_late_gradient, 2, kind):
        assert "a backward added gradients after" in message and "no_sync" in message and "parameter " in message


# ---- ZeRO-2


def _releases(kind: str, every: bool) -> None:
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
                    assert all(group.separate_shard is None for group in model.bucket_groups)
            finalize_model_grads([model])
            assert all(getattr(p, "main_grad", None) is None for p in model.parameters())
    if every:  # two ranks are added first, three micro-batches afterwards
        assert_same_sums(gradients(model), oracle(tied=False), additions=5)
    else:
        assert_same(gradients(model), oracle(tied=False))
    if every and len(model.bucket_groups) > 1:
        assert most <= 2 < len(model.bucket_groups)


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
@pytest.mark.parametrize("kind", ["zero2", "zero2_overlap"])
def test_whole_gradients_live_until_they_are_reduced(kind, every):
    run_distributed(_releases, 2, kind, every)


def _force_all_reduces(kind: str) -> dict[str, torch.Tensor]:
    model = build(kind, toy())
    accumulate(model)
    model.finish_grad_sync(force_all_reduce=True)
    return {name: p.main_grad.clone() for name, p in model.module.named_parameters() if p.requires_grad}


def test_force_all_reduce_leaves_whole_gradients():
    for kind in ("ddp", "zero1", "zero1_overlap"):
        for found in run_distributed(_force_all_reduces, 2, kind):
            assert_same(found, {name: g for name, g in oracle().items() if name != "head.weight"})
    with pytest.raises(RankFailure, match="force_all_reduce asks for whole gradients"):
        run_distributed(_force_all_reduces, 2, "zero2")


# ---- hybrid


def _shards_within_instances(kind: str, num_instances: int, every: bool) -> list[int]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=num_instances)
    fields = {**BUFFERED[kind], "num_distributed_optimizer_instances": num_instances}
    ddp_config = DistributedDataParallelConfig(**fields, reduce_every_micro_batch=every)
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
    return sorted({int(value) for p in model.parameters() if p.requires_grad for value in full(p).unique()})


@pytest.mark.parametrize(("kind", "every"), [("zero1", False), ("zero2_overlap", False), ("zero2_overlap", True)])
def test_hybrid_shards_in_an_instance_and_replicates_across(kind, every):
    assert run_distributed(_shards_within_instances, 4, kind, 2, every) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_distributed(_shards_within_instances, 4, kind, 1, every) == [[0, 1, 2, 3]] * 4
    assert run_distributed(_shards_within_instances, 4, kind, 4, every) == [[0], [1], [2], [3]]


# ---- precision


def _averages_in_fp16(average_in_collective: bool) -> list[float]:
    model = build("ddp", nn.Linear(1, 1, bias=False).half(), average_in_collective=average_in_collective)
    (model.module.weight * 40_000.0).sum().backward()  # twice that is more than fp16 holds
    model.finish_grad_sync()
    return model.module.weight.main_grad.flatten().tolist()


def test_fp16_is_scaled_before_adding_unless_averaged():
    assert run_distributed(_averages_in_fp16, 2, False) == [[40_000.0]] * 2
    assert run_distributed(_averages_in_fp16, 2, True) == [[float("inf")]] * 2


def _adds_bf16_in_fp32(in_fp32: bool) -> float:
    model = build("zero1", nn.Linear(1, 1, bias=False).bfloat16(), reduce_scatter_with_fp32_accumulation=in_fp32)
    (model.module.weight * [256.0, 1.0, 1.0, -256.0][dist.get_rank()]).sum().backward()
    model.finish_grad_sync()
    return gradients(model)["weight"].item()


def test_reduce_scatter_with_fp32_accumulation_rounds_once():
    assert run_distributed(_adds_bf16_in_fp32, 4, False) == [0.25] * 4  # 256 + 1 is 256 in bf16, and 1 - 256 is -255
    assert run_distributed(_adds_bf16_in_fp32, 4, True) == [0.5] * 4


def _equalises_replicas() -> None:
    model = build("ddp", toy(seed=1 + dist.get_rank()))
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, dict(toy(seed=1).named_parameters())[name]), name


def test_replicas_that_start_different_are_made_equal():
    run_distributed(_equalises_replicas, 2)


# ---- what is left behind


def _leaves_nothing(kind: str) -> None:
    model = build(kind, toy())
    accumulate(model)
    model.finish_grad_sync()
    left = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in left)


@pytest.mark.parametrize("kind", BUFFERED)
def test_an_unreferenced_wrapper_is_freed_with_its_model(kind):
    run_distributed(_leaves_nothing, 1, kind)
