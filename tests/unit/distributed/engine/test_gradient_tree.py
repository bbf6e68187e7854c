"""What `reproducible_across_ranks` asks of a training loop of one's own, and what it keeps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import ConfigError, ParallelConfigError, ShardstackError, UnitError
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    _BaseDataParallel,
    finalize_model_grads,
    wrap_model,
)
from core.distributed.flat.flat_engine import FlatEngine
from core.pipeline_parallel.schedules import forward_backward_no_pipelining
from core.transformer import TransformerConfig
from core.transformer.moe import MoELayer
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import Twice, build, gradients, loss_of, synced_last, toy

WRAPPERS = ("ddp", "zero2", "zero3", "fsdp2")


def _wrap(name: str = "ddp", module: Any = None, config: Any = None, **fields: Any) -> _BaseDataParallel:
    return build(name, toy() if module is None else module, config=config, reproducible_across_ranks=True, **fields)


def _tokens(index: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(index))


def _step(model: _BaseDataParallel, count: int, scale: float = 1.0) -> None:
    for number in synced_last(model, range(count)):
        (loss_of(model, _tokens(model.micro_batch_index(number))) * scale).backward()


def _gradients_of_a_loop(name: str, fields: dict[str, Any], divides: bool = True) -> dict[str, torch.Tensor]:
    """Returns gradients of 12 micro-batches, with losses that are means over a rank's micro-batches, or over all."""
    model = _wrap(name, **fields)
    ranks, count = dist.get_world_size(), 12 // dist.get_world_size()
    model.expect_micro_batches(count, divides_by_ranks=divides)
    for _ in range(2):  # nothing is left of a step
        model.zero_grad_buffer()
        _step(model, count, 1.0 / (count if divides else count * ranks))
        finalize_model_grads([model])
    return gradients(model)


@functools.cache
def _on_one_rank() -> dict[str, torch.Tensor]:
    return run_distributed(_gradients_of_a_loop, 1, "ddp", {})[0]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ddp", {}),
        ("zero2", {}),
        ("zero2", {"reduce_every_micro_batch": True}),
        ("zero3", {"reduce_every_micro_batch": True}),
        ("fsdp2", {}),
        ("fsdp2", {"reduce_every_micro_batch": True}),
    ],
)
def test_a_custom_loop_has_equal_gradients_on_one_two_four_ranks(name, fields):
    expected = _on_one_rank()
    assert len(expected) > 5 and all(gradient.abs().sum() > 0 for gradient in expected.values())
    for ranks, divides in ((2, False), (4, True)):
        for found in run_distributed(_gradients_of_a_loop, ranks, name, fields, divides):
            assert_same(found, expected)


def test_megatrons_schedule_gives_the_micro_batches_of_a_step():
    for found in run_distributed(_gradients_of_a_schedule, 2):
        assert_same(found, _on_one_rank())


def _gradients_of_a_schedule() -> dict[str, torch.Tensor]:
    model = _wrap("zero2", config=SimpleNamespace(finalize_model_grads_func=finalize_model_grads))
    numbers = itertools.count()

    def forward_step(data: Any, wrapped: Any) -> Any:
        loss = loss_of(wrapped, _tokens(model.micro_batch_index(next(numbers))))
        return loss, lambda output: (output, {})

    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=6,
        seq_length=5,
        micro_batch_size=2,
    )
    return gradients(model)


@on_ranks(4)
def test_sequence_parts_between_ranks_and_replicas_are_refused() -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2, num_distributed_optimizer_instances=2)
    fields = {"num_distributed_optimizer_instances": 2, "reproducible_across_ranks": True}
    with pytest.raises(ParallelConfigError, match="set num_distributed_optimizer_instances=1, or reduce_every"):
        wrap_model(toy(), SimpleNamespace(context_parallel_size=2), FullyShardedDataParallelConfig(**fields))


@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(2)
def test_a_step_with_another_number_of_backwards_raises(name: str) -> None:
    model = _wrap(name)
    with model.no_sync():
        loss_of(model, _tokens(0)).backward()
        with pytest.raises(ShardstackError, match=r"backward 2 of a step of 1: .* call the wrapper's expect_micro"):
            loss_of(model, _tokens(1)).backward()
    model.zero_grad_buffer()
    model.expect_micro_batches(4)
    with model.no_sync():
        loss_of(model, _tokens(0)).backward()
        loss_of(model, _tokens(1)).backward()
    with pytest.raises(ShardstackError, match="a step of 4 micro-batches cannot be reduced after 2 backwards"):
        finalize_model_grads([model])
    with pytest.raises(ShardstackError, match="after the first backward of a step of 4"):
        model.expect_micro_batches(2)
    with pytest.raises(ConfigError, match="expect_micro_batches was given 0"):
        model.expect_micro_batches(0)
    model.zero_grad_buffer()  # and the next step is as any other
    _step(model, 4)
    finalize_model_grads([model])


@on_ranks(2)
def test_what_would_replace_or_bypass_a_part_of_the_tree_raises() -> None:
    model = _wrap("ddp")
    loss_of(model, _tokens(0)).backward()
    first = model.module.embedding.weight
    first.grad = torch.ones_like(first)
    with pytest.raises(ShardstackError, match=r"was given a \.grad before finalize_model_grads"):
        finalize_model_grads([model])
    config = DistributedDataParallelConfig(reproducible_across_ranks=True)
    with pytest.raises(ParallelConfigError, match="finish_in_backward reduces gradients after each backward"):
        DistributedDataParallel(
            SimpleNamespace(), config, toy(), process_group=dist.group.WORLD, finish_in_backward=True
        )
    plain = build("ddp", toy())
    plain.expect_micro_batches(3)
    assert [plain.micro_batch_index(number) for number in (0, 1)] == [dist.get_rank(), 2 + dist.get_rank()]
    with pytest.raises(ConfigError, match="divides_by_ranks=False without reproducible_across_ranks"):
        plain.expect_micro_batches(3, divides_by_ranks=False)

    written = _wrap("ddp")
    weight = written.module.embedding.weight

    def add_itself(gradient: torch.Tensor) -> torch.Tensor:
        weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        return gradient

    weight.register_hook(add_itself)
    with pytest.raises(ShardstackError, match=r"a layer added the gradient of parameter \S+ into main_grad itself"):
        loss_of(written, _tokens(0)).backward()


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_a_unit_that_runs_twice_is_one_leaf_on_buffers(name):
    expected = run_distributed(_twice, 1, "ddp")[0]
    for found in run_distributed(_twice, 2, name):
        assert_same(found, expected)


def _twice(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = _wrap(name, module=Twice())
    count = 4 // dist.get_world_size()
    model.expect_micro_batches(count)
    _step(model, count, 1.0 / count)
    finalize_model_grads([model])
    return gradients(model)


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
@on_ranks(2)
def test_as_many_sums_wait_as_the_formula_says(name: str) -> None:
    model = _wrap(name)
    whole = sum(parameter.numel() for parameter in toy().parameters() if parameter.requires_grad)
    for count, waiting in ((1, 0), (2, 0), (3, 0), (4, 1), (12, 2), (16, 3)):
        assert model.plan.tree is not None and model.plan.tree.num_set_aside(count) == waiting
        model.zero_grad_buffer()
        model.expect_micro_batches(count)
        most = 0
        for number in range(count):
            with model.no_sync():
                loss_of(model, _tokens(number)).backward()
            most = max(most, sum(tensor.numel() for tensor in model.engine.held()["gradients"]))
        # And the sum that is added to: flat buffers are padded by a few hundred elements, FSDP2's are not.
        assert waiting * whole <= most <= (waiting + 1) * (whole + 1000), count


def _train_steps(name: str, counts: Sequence[int], fields: dict[str, Any]) -> tuple[int, int]:
    """Trains steps of so many micro-batches. Returns how many whole gradients the last one allocates, and how many are
    kept after it."""
    model = build(name, toy(), **fields)
    assert isinstance(model.engine, FlatEngine)
    memories = [buffer.grad_memory for buffer in model.engine.buffers]
    calls: list[int] = []
    for memory in memories:
        allocate = memory._allocate
        memory._allocate = lambda *size, allocate=allocate: (calls.append(1), allocate(*size))[1]
    for count in counts:
        model.zero_grad_buffer()
        model.expect_micro_batches(count)
        calls.clear()
        for number in synced_last(model, range(count)):
            loss_of(model, _tokens(number)).backward()
        finalize_model_grads([model])
    return len(calls), sum(len(memory.kept) for memory in memories)


REPRODUCIBLE = {"reproducible_across_ranks": True}


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_memory_of_sums_that_wait_goes_round(name: str) -> None:
    allocated, kept = _train_steps(name, (4, 4), REPRODUCIBLE)
    assert allocated == 0 and kept > 0


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero2_overlap", "zero3"])
@on_ranks(2)
def test_without_waiting_sums_the_mode_keeps_no_more_memory(name: str) -> None:
    for counts in ((1, 1), (3, 3), (4, 1, 1)):
        assert _train_steps(name, counts, REPRODUCIBLE) == _train_steps(name, counts[-2:], {})


# ---- what FSDP2 cannot add up in a tree


@on_ranks(2)
def test_a_unit_that_runs_twice_raises_under_fsdp2() -> None:
    for count in (1, 4):
        model = _wrap("fsdp2", Twice())
        model.expect_micro_batches(count)
        with pytest.raises(UnitError, match=r"unit blocks\.0 ran twice in one forward"):
            _step(model, count)


@on_ranks(2)
def test_an_early_backward_outside_no_sync_raises() -> None:
    model = _wrap("fsdp2")
    model.expect_micro_batches(2)
    with pytest.raises(ShardstackError, match="put every backward of a step but the last inside no_sync"):
        loss_of(model, _tokens(0)).backward()


@on_ranks(2)
def test_an_all_reduce_hook_of_the_caller_raises() -> None:
    model = _wrap("fsdp2")
    model.module.set_all_reduce_hook(lambda shard: None)
    with pytest.raises(UnitError, match="set_all_reduce_hook was called on"):
        loss_of(model, _tokens(0)).backward()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_loss_of_all_replicas_counts_is_refused(name: str) -> None:
    fields = {"num_moe_experts": 2, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    run_distributed(_refuses_counts, 1, name, sizes | fields)


def _refuses_counts(name: str, fields: dict[str, Any]) -> None:
    module = MoELayer(TransformerConfig(**fields))
    with pytest.raises(ParallelConfigError, match="reproducible_across_ranks is set, and what 'global_aux_loss'"):
        build(name, module, config=module.config, reproducible_across_ranks=True)
