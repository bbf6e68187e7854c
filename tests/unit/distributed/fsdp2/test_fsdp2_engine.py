"""The settings that FSDP2 has beyond those of every wrapper: each has its effect, and none changes a number."""

from __future__ import annotations

import warnings
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
from core.base.errors import ParallelConfigError, ShardstackError, warn_once
from core.comm import collectives
from core.dist_checkpointing.global_view import held_boxes
from core.distributed import TorchFullyShardedDataParallel, finalize_model_grads, wrap_model
from core.distributed.fsdp2.shard_model import fsdp_modules
from core.distributed.fsdp2.torch_private import TorchTensors
from core.distributed.plan import UnitPlan
from core.distributed.plan.make_plan import units_at_the_ends
from core.distributed.plan.units import unit_of
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_layer import TransformerLayer
from tests.unit._gpt import build_gpt
from tests.unit._quick import quick
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed import _toys
from tests.unit.distributed._toys import (
    CountedTraffic,
    Stack,
    accumulate,
    batches,
    build,
    gradients,
    oracle,
    synced_last,
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


def step(model: Any) -> None:
    accumulate(model)
    finalize_model_grads([model])


@pytest.mark.parametrize(
    ("kind", "tied"),
    quick(product(("fsdp2", "zero3"), (True, False)), {("fsdp2", True), ("zero3", False)}.__contains__),
)
@on_ranks(2)
def test_no_setting_changes_a_number(kind: str, tied: bool) -> None:
    own = CUTS if kind == "zero3" else [settings for settings in VARIANTS if "collectives" in settings]
    for settings in [*own, *(settings for settings in VARIANTS if "collectives" not in settings)]:
        model = build(kind, toy(tied=tied), **settings)
        for _ in range(2):  # the second time the order of units is known
            model.zero_grad_buffer()
            with torch.no_grad():
                model(batches(0)[0])
            step(model)
        found, expected = gradients(model), oracle(tied=tied)
        if "reduce_every_micro_batch" in settings:  # which adds three micro-batches of two ranks in another order
            assert_same_sums(found, expected, additions=5)
        else:
            assert all(torch.equal(found[name], value) for name, value in expected.items()), settings


# ---- when parameters are gathered


def stacked(**settings: Any) -> TorchFullyShardedDataParallel:
    return build("fsdp2", Stack(4), unit_classes=[nn.Linear], **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # root and layers, and all layers but the last again for backward
        ({"keep_gathered_between_micro_batches": "none"}, 3 * (1 + 4 + 3)),
        ({"keep_gathered_between_micro_batches": "none", "reshard_overrides": ("=True", "layers.3=True")}, 3 * 10),
        ({"keep_gathered_between_micro_batches": "none", "reshard_after_forward": False}, 3 * (1 + 4)),
        ({"keep_gathered_between_micro_batches": "all"}, 1 + 4),
        ({}, (1 + 1 + 1) + 3 * (2 + 3)),  # root, first and last layer once; then as above
        ({"reduce_every_micro_batch": True}, 3 * (1 + 4 + 3)),
        ({"forward_prefetch": 0, "backward_prefetch": 0}, (1 + 1 + 1) + 3 * (2 + 3)),
        ({"forward_prefetch": 2, "backward_prefetch": 3, "collectives": "torch"}, (1 + 1 + 1) + 3 * (2 + 3)),
    ],
)
@on_ranks(2)
def test_settings_decide_how_often_parameters_are_gathered(settings: dict[str, Any], expected: int) -> None:
    model = stacked(**settings)
    for _ in range(2):
        with CountedTraffic() as traffic:
            for x in synced_last(model, [torch.ones(2, 6)] * 3):
                model(x).sum().backward()
            model.finish_grad_sync()
        model.zero_grad_buffer()
    assert traffic.gathers == expected


def _keeps_parameters_whole_among_neighbours(reshard: Any) -> list[list[int]]:
    gathered_from: list[int] = []
    model = stacked(reshard_after_forward=reshard, collectives="torch", keep_gathered_between_micro_batches="none")
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def record(output: Any, input_: Any, group: Any, async_op: bool) -> Any:
        gathered_from.append(group.size())
        return gather(output, input_, group=group, async_op=async_op)

    expected = Stack(4)
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    with torch.no_grad():
        model(x)
    assert not any(part.tensor is not None for part in model.engine.parameters._parts)
    with model.no_sync():
        model(2.0 * x).sum().backward()
    with mock.patch.object(dist, name, record):
        loss = model(x).sum()
        if reshard == 2:
            rows = 2 * 2  # of 6, which are padded to 4 times 2
            assert [part.tensor.numel() for part in model.engine.parameters._parts] == [rows * 6 + rows] * 3
        loss.backward()
        assert not any(part.tensor is not None for part in model.engine.parameters._parts)
    model.finish_grad_sync()
    for rank in range(4):
        for factor in (2.0, 1.0):
            expected(torch.full((2, 6), factor * (1.0 + rank))).sum().div(4).backward()
    # Two micro-batches of four ranks, each a sum over two rows.
    assert_same_sums(gradients(model), gradients(expected), additions=15)
    return sorted(gathered_from)


def test_a_number_gathers_for_backward_from_that_many_ranks():
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 2) == [[2] * 3 + [4] * 5] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 4) == [[4] * 8] * 4
    assert run_distributed(_keeps_parameters_whole_among_neighbours, 4, 1) == [[4] * 5] * 4


@on_ranks(2)
def test_a_number_must_divide_the_ranks() -> None:
    with pytest.raises(ParallelConfigError, match=r"is 3, which does not divide the 2 ranks .* one of 1, 2"):
        stacked(reshard_after_forward=3)


# ---- how gradients are reduced


def _fsdp_params(module: Any) -> list[Any]:
    return [p for g in fsdp_param_groups(module._get_fsdp_state()) for p in g.fsdp_params if p.param_dtype is None]


@on_ranks(2)
def test_reduce_every_micro_batch_keeps_no_whole_gradient() -> None:
    calls = []
    for every in (False, True):
        model = build("fsdp2", toy(tied=False), reduce_every_micro_batch=every)
        with CountedTraffic() as traffic:
            step(model)
        calls.append(traffic.reductions)
        assert all(p._unsharded_param.grad is None for m in fsdp_modules(model) for p in _fsdp_params(m))
    assert calls[1] == 3 * calls[0] > 0


@on_ranks(2)
def test_gradients_really_go_through_the_direct_exchange() -> None:
    reduce_scatter = collectives.reduce_scatter

    def doubled(output: torch.Tensor, *args: Any, **options: Any) -> None:
        reduce_scatter(output, *args, **options)
        output.mul_(2.0)

    with mock.patch.object(collectives, "reduce_scatter", doubled):
        model = build("fsdp2", toy())
        step(model)
    assert_same(gradients(model), {name: 2.0 * gradient for name, gradient in oracle().items()})


@on_ranks(2)
def test_a_micro_batch_of_one_sample_warns_of_nothing() -> None:
    module = build_gpt(False)
    model = build("fsdp2", module, unit_classes=[TransformerLayer])
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, labels=tokens).sum().backward()
        model.finish_grad_sync()


# ---- offload


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
@on_ranks(2)
def test_offloaded_shards_give_the_same_step(kind: str) -> None:
    warn_once.cache_clear()  # ranks are reused
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [build(kind, toy(), cpu_offload=offload) for offload in (True, False)]
    assert not caught
    pins = [model.plan.settings.pins_memory for model in models]
    assert pins == [torch.accelerator.is_available(), False]
    norms = []
    for model in models:
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
        step(model)
        norms.append(optimizer.step()[1])
    assert norms[0] == norms[1] and norms[0] > 0.01
    for offloaded, kept in zip(*(model.state_dict().values() for model in models), strict=True):
        for (_, one), (_, other) in zip(held_boxes(offloaded), held_boxes(kept), strict=True):
            assert one.device.type == "cpu" and torch.equal(one, other)


# ---- hybrid


@on_ranks(4)
def test_the_norm_on_a_2d_mesh_counts_every_element_once() -> None:
    norms = []
    for instances in (2, 1):
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        ddp_config = _toys.settings("fsdp2", num_distributed_optimizer_instances=instances)
        model = wrap_model(toy(), SimpleNamespace(), ddp_config, sub_modules_to_wrap=_toys.UNITS)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01), [model])
        step(model)
        squares = sum(gradient.double().square().sum() for gradient in gradients(model).values())
        norms.append(optimizer.step()[1])
        assert norms[-1] == pytest.approx(squares.sqrt().item(), rel=1e-6)
        parallel_state.destroy_model_parallel()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    of_ranks = [None] * 4
    dist.all_gather_object(of_ranks, norms)
    assert all(of_rank == norms for of_rank in of_ranks)


# ---- what stays gathered between micro-batches


def _unit(name: str, *, read_in_backward: bool = True, is_minority: bool = False) -> UnitPlan:
    module = nn.Identity()
    module.weights_used_in_backward = read_in_backward
    return unit_of((module,), {module: name}, is_minority=is_minority)


def test_the_ends_include_units_that_backward_does_not_gather():
    units = [
        _unit("table", read_in_backward=False),
        _unit("layers.0.norm", is_minority=True),
        *(_unit(f"layers.{number}") for number in range(3)),
        _unit("head"),
        _unit("head.norm", is_minority=True),
    ]
    assert [unit.names[0] for unit in units_at_the_ends(units)] == ["table", "layers.0", "head"]
    assert units_at_the_ends([]) == []


def _bytes_gathered(**settings: Any) -> list[int]:
    """Returns the gathered bytes after each of three micro-batches, and after the step."""
    module = toy(tied=False)
    module.embedding.weights_used_in_backward = False
    model = build("fsdp2", module, config=SimpleNamespace(), **settings)
    held = []
    for tokens in synced_last(model, [torch.tensor([[1, 2, 3]])] * 3):
        model(tokens).sum().backward()
        storages = [tensor.untyped_storage() for tensor in TorchTensors(fsdp_modules(module)).gathered_tensors()]
        held.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    return held


@on_ranks(2)
def test_nothing_stays_gathered_beyond_the_last_micro_batch() -> None:
    for settings in ({}, {"collectives": "torch"}):
        every = _bytes_gathered(keep_gathered_between_micro_batches="all", **settings)
        ends = _bytes_gathered(**settings)
        none = _bytes_gathered(keep_gathered_between_micro_batches="none", **settings)
        lean = _bytes_gathered(reduce_every_micro_batch=True, **settings)
        assert every[0] == every[1] > ends[0] == ends[1] > 0
        assert none == lean == [0, 0, 0] and every[2] == ends[2] == 0


@on_ranks(2)
def test_torchs_optimizer_reads_finite_gradients() -> None:
    model = build("fsdp2", toy(), check_for_nan_in_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = _toys.loss_of(model, batches(dist.get_rank())[0])
    (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
    with pytest.raises(ShardstackError, match=r"the gradient of .*, reduced over ranks that may .* is not finite"):
        optimizer.step()
