"""The settings that FSDP2 has beyond those of every wrapper: each has its effect, and none changes a number."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base._torch_compat import fsdp_param_groups
from core.base.errors import ParallelConfigError, warn_once
from core.comm import collectives
from core.dist_checkpointing.global_view import held_boxes
from core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig, finalize_model_grads
from core.distributed.fsdp2.shard_model import fsdp_modules
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_layer import TransformerLayer
from tests.functional._runs import build_gpt
from tests.unit._quick import quick
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import (
    GatherCounter,
    GradientTraffic,
    Stack,
    batches,
    build,
    gradients,
    loss_of,
    oracle,
    toy,
)

VARIANTS: list[dict[str, Any]] = [
    {"reshard_after_forward": False},
    {"reshard_overrides": ("=True", "blocks.0=False", "head=True")},
    {"forward_prefetch": 0, "backward_prefetch": 0},
    {"forward_prefetch": 3, "backward_prefetch": 2},
    {"collectives": "torch"},
    {"collectives": "torch", "forward_prefetch": 0, "backward_prefetch": 0},
    {"keep_gathered_between_micro_batches": "none"},
    {"keep_gathered_between_micro_batches": "all"},
    {"keep_gathered_between_micro_batches": "all", "reduce_every_micro_batch": True},
    {"reduce_every_micro_batch": True},
    {"cpu_offload": True},
]
CUTS: list[dict[str, Any]] = [{"shard_cut": cut} for cut in ("flat", "rows", "tensor", "block:4")]


def step(model: Any, rank: int) -> None:
    for index, tokens in enumerate(batches(rank)):
        with nullcontext() if index == 2 else model.no_sync():
            loss_of(model, tokens).backward()
    finalize_model_grads([model])


def _gives_the_numbers_of_the_serial_run(kind: str, tied: bool) -> None:
    own = CUTS if kind == "zero3" else [settings for settings in VARIANTS if "collectives" in settings]
    for settings in [*own, *(settings for settings in VARIANTS if "collectives" not in settings)]:
        model = build(kind, toy(tied=tied), **settings)
        for _ in range(2):  # the second time the order of units is known
            model.zero_grad_buffer()
            with torch.no_grad():
                model(batches(0)[0])
            step(model, dist.get_rank())
        found, expected = gradients(model), oracle(tied=tied)
        if "reduce_every_micro_batch" in settings:  # which adds three micro-batches of two ranks in another order
            assert_same_sums(found, expected, additions=5)
        else:
            assert all(torch.equal(found[name], value) for name, value in expected.items()), settings


@pytest.mark.parametrize(
    ("kind", "tied"),
    quick(product(("fsdp2", "zero3"), (True, False)), {("fsdp2", True), ("zero3", False)}.__contains__),
)
def test_no_setting_changes_a_number(kind, tied):
    run_distributed(_gives_the_numbers_of_the_serial_run, 2, kind, tied)


# ---- when parameters are gathered


def stacked(**settings: Any) -> TorchFullyShardedDataParallel:
    return build("fsdp2", Stack(), unit_classes=[nn.Linear], **settings)


def _gathers_of_a_step(settings: dict[str, Any]) -> int:
    model = stacked(**settings)
    for _ in range(2):
        with GatherCounter() as gathers:
            for index in range(4):
                with nullcontext() if index == 3 else model.no_sync():
                    model(torch.ones(2, 6)).sum().backward()
            model.finish_grad_sync()
        model.zero_grad_buffer()
    return gathers.calls


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # root and layers, and all layers but the last again for backward
        ({"keep_gathered_between_micro_batches": "none"}, 4 * (1 + 8 + 7)),
        ({"keep_gathered_between_micro_batches": "none", "reshard_overrides": ("=True", "layers.7=True")}, 4 * 18),
        ({"keep_gathered_between_micro_batches": "none", "reshard_after_forward": False}, 4 * (1 + 8)),
        ({"keep_gathered_between_micro_batches": "all"}, 1 + 8),
        ({}, (1 + 1 + 1) + 4 * (6 + 7)),  # root, first and last layer once; then as above
        ({"reduce_every_micro_batch": True}, 4 * (1 + 8 + 7)),
        ({"forward_prefetch": 0, "backward_prefetch": 0}, (1 + 1 + 1) + 4 * (6 + 7)),
        ({"forward_prefetch": 2, "backward_prefetch": 3, "collectives": "torch"}, (1 + 1 + 1) + 4 * (6 + 7)),
    ],
)
def test_settings_decide_how_often_parameters_are_gathered(settings, expected):
    assert run_distributed(_gathers_of_a_step, 2, settings) == [expected] * 2


def _keeps_parameters_whole_among_neighbours(reshard: Any) -> list[list[int]]:
    gathered_from: list[int] = []
    model = stacked(reshard_after_forward=reshard, collectives="torch", keep_gathered_between_micro_batches="none")
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def record(output: Any, input_: Any, group: Any, async_op: bool) -> Any:
        gathered_from.append(group.size())
        return gather(output, input_, group=group, async_op=async_op)

    expected = Stack()
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    with torch.no_grad():
        model(x)
    assert not any(part.tensor is not None for part in model._parts)
    with model.no_sync():
        model(2.0 * x).sum().backward()
    with mock.patch.object(dist, name, record):
        loss = model(x).sum()
        if reshard == 2:
            rows = 2 * 2  # of 6, which are padded to 4 times 2
            assert [part.tensor.numel() for part in model._parts] == [rows * 6 + rows] * 7
        loss.backward()
        assert not any(part.tensor is not None for part in model._parts)
    model.finish_grad_sync()
    for rank in range(4):
        for factor in (2.0, 1.0):
            expected(torch.full((2, 6), factor * (1.0 + rank))).sum().div(4).backward()
    # Two micro-batches of four ranks, each a sum over two rows.
    assert_same_sums(gradients(model), gradients(expected), additions=15)
    return sorted(gathered_from)


def test_a_number_gathers_for_backward_from_that_many_ranks():
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 2) == [[2] * 7 + [4] * 9] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 4) == [[4] * 16] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 1) == [[4] * 9] * 4


def _refuses_a_number_that_does_not_divide() -> None:
    with pytest.raises(ParallelConfigError, match=r"is 3, which does not divide the 2 ranks .* one of 1, 2"):
        stacked(reshard_after_forward=3)


def test_a_number_must_divide_the_ranks():
    run_distributed(_refuses_a_number_that_does_not_divide, 2)


# ---- how gradients are reduced


def _reduces_each_micro_batch() -> list[int]:
    calls = []
    for every in (False, True):
        model = build("fsdp2", toy(tied=False), reduce_every_micro_batch=every)
        with GradientTraffic() as traffic:
            step(model, dist.get_rank())
        calls.append(traffic.calls)
        assert all(p._unsharded_param.grad is None for m in fsdp_modules(model) for p in _fsdp_params(m))
    return calls


def _fsdp_params(module: Any) -> list[Any]:
    return [p for g in fsdp_param_groups(module._get_fsdp_state()) for p in g.fsdp_params if p.param_dtype is None]


def test_reduce_every_micro_batch_keeps_no_whole_gradient():
    once, every = run_distributed(_reduces_each_micro_batch, 2)[0]
    assert every == 3 * once > 0


def _doubles_gradients_when_the_exchange_does() -> bool:
    reduce_scatter = collectives.reduce_scatter

    def doubled(output: torch.Tensor, *args: Any, **options: Any) -> None:
        reduce_scatter(output, *args, **options)
        output.mul_(2.0)

    with mock.patch.object(collectives, "reduce_scatter", doubled):
        model = build("fsdp2", toy())
        step(model, dist.get_rank())
    return all(torch.equal(gradients(model)[name], 2.0 * wanted) for name, wanted in oracle().items())


def test_gradients_really_go_through_the_direct_exchange():
    assert run_distributed(_doubles_gradients_when_the_exchange_does, 2) == [True, True]


def _trains_on_one_sample() -> None:
    module = build_gpt(False)
    model = build("fsdp2", module, unit_classes=[TransformerLayer])
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, labels=tokens).sum().backward()
        model.finish_grad_sync()


def test_a_micro_batch_of_one_sample_warns_of_nothing():
    run_distributed(_trains_on_one_sample, 2)


# ---- offload


def _keeps_shards_on_the_host(kind: str) -> list[str]:
    warn_once.cache_clear()  # ranks are reused
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [build(kind, toy(), cpu_offload=offload) for offload in (True, False)]
    norms = []
    for model in models:
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
        step(model, dist.get_rank())
        norms.append(optimizer.step()[1])
    assert norms[0] == norms[1] and norms[0] > 0.01
    for offloaded, kept in zip(*(model.state_dict().values() for model in models), strict=True):
        for (_, one), (_, other) in zip(held_boxes(offloaded), held_boxes(kept), strict=True):
            assert one.device.type == "cpu" and torch.equal(one, other)
    return [str(warning.message) for warning in caught if "pin_memory" in str(warning.message)]


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_offloaded_shards_give_the_same_step(kind):
    said = run_distributed(_keeps_shards_on_the_host, 2, kind)[0]
    assert len(said) == (0 if torch.accelerator.is_available() else 1)


# ---- hybrid


def _clips_equally(num_instances: int) -> float:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=num_instances)
    ddp_config = TorchFullyShardedDataParallelConfig(num_distributed_optimizer_instances=num_instances)
    model = TorchFullyShardedDataParallel(SimpleNamespace(), ddp_config, toy(), _toys.UNITS)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
    step(model, dist.get_rank())
    squares = sum(gradient.double().square().sum() for gradient in gradients(model).values())
    norm = optimizer.step()[1]
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-6)
    return norm


def test_the_norm_on_a_2d_mesh_counts_every_element_once():
    hybrid, sharded = (run_distributed(_clips_equally, 4, instances) for instances in (2, 1))
    assert len(set(hybrid)) == 1 and hybrid[0] == pytest.approx(sharded[0], rel=1e-6)
