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
from torch.distributed.tensor import distribute_tensor

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.buffers.bucket_group import BucketGroup
from core.errors import ParallelConfigError, ShardstackError, WrapError
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import RankFailure, run_distributed
from tests.unit.distributed._scenarios import SCENARIOS, serial_gradients, wrapped_gradients
from tests.unit.distributed._toys import (
    BUFFERED,
    GradientTraffic,
    batches,
    build,
    full,
    gradients,
    loss_of,
    oracle,
    toy,
)

OVERLAPPING = [kind for kind in BUFFERED if kind.endswith("overlap")]
SHARDED = [kind for kind in BUFFERED if kind.startswith("zero")]


def accumulate(model: nn.Module) -> None:
    steps = batches(dist.get_rank())
    for index, tokens in enumerate(steps):
        with nullcontext() if index == len(steps) - 1 else model.no_sync():
            loss_of(model, tokens).backward()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"differ: {wrong}"


# ---- however gradients arrive


def _equals_the_serial_run(kind: str, name: str) -> None:
    for step, found in enumerate(wrapped_gradients(kind, SCENARIOS[name])):
        assert_same(found, serial_gradients(SCENARIOS[name], step))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", BUFFERED)
def test_however_gradients_arrive_they_are_the_serial_ones(kind, scenario):
    run_distributed(_equals_the_serial_run, 2, kind, scenario)


def _sends_incomplete_buckets() -> None:
    with mock.patch.object(BucketGroup, "is_complete", True):
        model = build("ddp_overlap", toy())
        accumulate(model)
        model.finish_grad_sync()


def test_a_bucket_that_left_before_its_gradients_were_in_would_be_noticed():
    with pytest.raises(RankFailure, match="got a gradient after"):
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
def test_a_gradient_after_its_bucket_has_left_is_an_error_that_names_no_sync(kind):
    for message in run_distributed(_takes_a_late_gradient, 2, kind):
        assert "got a gradient after" in message and "no_sync" in message and "parameter " in message


# ---- buckets


def _reduces(bucket_size: int | None, disable_bucketing: bool, average_in_collective: bool) -> int:
    ddp_config = DistributedDataParallelConfig(bucket_size=bucket_size, average_in_collective=average_in_collective)
    model = DistributedDataParallel(object(), ddp_config, toy(), disable_bucketing, process_group=dist.group.WORLD)
    for tokens in batches(dist.get_rank()):
        loss_of(model, tokens).backward()
    with GradientTraffic() as traffic:
        finalize_model_grads([model])
    assert_same(gradients(model), oracle())
    return traffic.calls


@pytest.mark.parametrize("average_in_collective", [False, True])
def test_a_bucket_is_full_at_bucket_size_elements(average_in_collective):
    # In reverse, of two blocks with down 42, up 40 and gain 1, and the embedding of 77: 82, 83 and 78 elements.
    assert run_distributed(_reduces, 2, 50, False, average_in_collective) == [3, 3]
    assert run_distributed(_reduces, 2, 50, True, average_in_collective) == [1, 1]
    assert run_distributed(_reduces, 2, None, False, average_in_collective) == [1, 1]


def _leaves_during_backward(kind: str) -> tuple[int, int]:
    model = build(kind, toy(tied=False))
    with mock.patch.object(
        BucketGroup, "start_grad_sync", autospec=True, side_effect=BucketGroup.start_grad_sync
    ) as m:
        accumulate(model)
        left = [call.args[0] for call in m.call_args_list]
    assert left == model.bucket_groups[: len(left)]
    return len(left), len(model.bucket_groups)


def test_buckets_leave_during_the_last_backward_in_a_fixed_order_where_asked():
    for kind in BUFFERED:
        for left, buckets in run_distributed(_leaves_during_backward, 2, kind):
            assert left == (0 if kind in ("ddp", "zero1") else buckets), kind


def _gradients_are_views() -> None:
    model = build("ddp", toy())
    accumulate(model)
    storages = {p.main_grad.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
    (buffer,) = model.buffers
    assert storages == {buffer.grad_data.data_ptr()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model.module.frozen, "main_grad")
    assert buffer.numel < sum(p.numel() for p in model.parameters()) + 64 * (len(buffer.params) + 2)
    names = [name for name, p in toy().named_parameters() if p.requires_grad]
    assert buffer.names == names[::-1]


def test_main_grads_are_views_of_one_buffer_and_frozen_parameters_have_none():
    run_distributed(_gradients_are_views, 1)


def _parameters_are_views(kind: str) -> None:
    model = build(kind, toy())
    for buffer in model.buffers:
        for parameter, (start, end) in buffer.ranges.items():
            assert torch.equal(buffer.param_data[start:end].view(parameter.shape), parameter)
            assert parameter.data_ptr() == buffer.param_data[start:end].data_ptr()
    assert_same(model.state_dict(), toy().state_dict())
    with torch.no_grad():
        for group in model.bucket_groups:
            group.bucket.local_param_shard += dist.get_rank() + 1.0
    model.start_param_sync(force_sync=True)
    for group in model.bucket_groups:
        expected = torch.arange(1.0, 3.0).repeat_interleave(group.bucket.numel // 2)
        for parameter in group.bucket.params:
            start, end = group.bucket.range_of(parameter)
            moved = (
                parameter.detach().flatten()
                - dict(zip(model.parameters(), toy().parameters(), strict=True))[parameter].detach().flatten()
            )
            assert torch.allclose(moved, expected[start:end], atol=1e-6)


@pytest.mark.parametrize("kind", SHARDED)
def test_parameters_are_views_of_the_buffer_into_which_shards_are_gathered(kind):
    run_distributed(_parameters_are_views, 2, kind)


# ---- ZeRO-2


def _releases(kind: str, every: bool) -> None:
    model = build(kind, toy(tied=False), reduce_every_micro_batch=every)
    most = 0

    def held() -> int:
        return sum(group.bucket.grad_data is not None for group in model.bucket_groups)

    def watch(group: BucketGroup) -> None:
        nonlocal most
        most = max(most, held())
        start(group)

    start = BucketGroup.start_grad_sync
    with mock.patch.object(BucketGroup, "start_grad_sync", watch):
        for _ in range(2):
            model.zero_grad_buffer()
            for index, tokens in enumerate(batches(dist.get_rank())):
                with nullcontext() if index == 2 else model.no_sync():
                    loss_of(model, tokens).backward()
                assert held() == (0 if every or index == 2 else len(model.bucket_groups))
                if not every and index < 2:  # shards are not needed yet
                    assert all(group.bucket.separate_shard is None for group in model.bucket_groups)
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


def test_force_all_reduce_leaves_whole_gradients_where_there_are_any():
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
            group.bucket.local_param_shard.fill_(dist.get_rank())
    model.start_param_sync(force_sync=True)
    return sorted({int(value) for p in model.parameters() if p.requires_grad for value in full(p).unique()})


@pytest.mark.parametrize(("kind", "every"), [("zero1", False), ("zero2_overlap", False), ("zero2_overlap", True)])
def test_hybrid_sharding_cuts_within_an_instance_and_replicates_across(kind, every):
    assert run_distributed(_shards_within_instances, 4, kind, 2, every) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_distributed(_shards_within_instances, 4, kind, 1, every) == [[0, 1, 2, 3]] * 4
    assert run_distributed(_shards_within_instances, 4, kind, 4, every) == [[0], [1], [2], [3]]


# ---- precision


def _averages_in_fp16(average_in_collective: bool) -> list[float]:
    model = build("ddp", nn.Linear(1, 1, bias=False).half(), average_in_collective=average_in_collective)
    (model.module.weight * 40_000.0).sum().backward()  # twice that is more than fp16 holds
    model.finish_grad_sync()
    return model.module.weight.main_grad.flatten().tolist()


def test_fp16_is_scaled_before_it_is_added_unless_the_collective_averages():
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


# ---- what cannot be honoured


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


def _equalises_replicas() -> None:
    model = build("ddp", toy(seed=1 + dist.get_rank()))
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, dict(toy(seed=1).named_parameters())[name]), name


def test_replicas_that_start_different_are_made_equal():
    run_distributed(_equalises_replicas, 2)


def _refuses_to_compute_in_fp32_in_silence() -> None:
    with pytest.raises(ParallelConfigError, match=r"config\.bf16 is set, but every parameter is fp32"):
        build("ddp", toy(), config=SimpleNamespace(bf16=True))


def test_half_precision_needs_parameters_in_it():
    run_distributed(_refuses_to_compute_in_fp32_in_silence, 1)


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


def _trains_without_its_wrapper() -> None:
    inner = build("ddp", toy(), config=SimpleNamespace(gradient_accumulation_fusion=False)).module
    gc.collect()
    with pytest.raises(WrapError, match="no longer exists"):
        loss_of(inner, batches(0)[0]).backward()


def test_a_backward_after_the_wrapper_has_gone_is_an_error():
    run_distributed(_trains_without_its_wrapper, 1)
