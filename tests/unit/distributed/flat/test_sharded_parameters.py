"""When units on flat buffers are gathered, into which slot, what their parameters show in between, and casts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from core.base.errors import warn_once
from core.comm import collectives
from core.distributed import FullyShardedDataParallel, TorchFullyShardedDataParallel, finalize_model_grads
from core.distributed.flat.unit import POISONS, Unit
from core.distributed.report.table import model_facts
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._quick import quick
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import UNITS, Stack, batches, build, gradients, loss_of, synced_last, toy
from tests.unit.distributed._toys import settings as settings_of


@contextmanager
def _gathers() -> Iterator[list[str]]:
    """Returns the names of what is gathered, in order."""
    all_gather, names = collectives.all_gather, list[str]()

    def recorded(*args: Any, what: str, **options: Any) -> None:
        names.append(what.removeprefix("the parameters of unit "))
        all_gather(*args, what=what, **options)

    with mock.patch.object(collectives, "all_gather", recorded):
        yield names


def _stacked(**settings: Any) -> FullyShardedDataParallel:
    model = build("zero3", Stack(layers=4), unit_classes=(nn.Linear,), **settings)
    os.environ[POISONS] = "0"  # what is there already is not gathered again
    assert isinstance(model, FullyShardedDataParallel)
    return model


ROOT = "of the model itself"


@pytest.mark.parametrize(
    ("settings", "micro_batches", "expected"),
    [
        # Layers 2 and 3 are in the two slots when backward begins; 1 and 0 are gathered again.
        ({}, 1, [ROOT, "0", "1", "2", "3", "1", "0"]),
        # Layers 0 and 1 are in them when the second forward begins.
        ({}, 2, [ROOT, "0", "1", "2", "3", "1", "0", "2", "3", "1", "0"]),
        ({"forward_prefetch": 0, "backward_prefetch": 0}, 1, [ROOT, "0", "1", "2", "3", "2", "1", "0"]),
        ({"forward_prefetch": 2}, 1, [ROOT, "0", "1", "2", "3", "0"]),
        ({"reshard_after_forward": False}, 2, [ROOT, "0", "1", "2", "3"]),
        ({"reshard_overrides": ("layers.0=False",)}, 1, [ROOT, "0", "1", "2", "3", "1"]),
    ],
)
@on_ranks(2)
def test_units_are_gathered_where_another_has_had_their_slot(
    settings: dict[str, Any], micro_batches: int, expected: list[str]
) -> None:
    model = _stacked(**settings)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    for _ in range(2):
        with _gathers() as names:
            model.zero_grad_buffer()
            for x in synced_last(model, [torch.ones(2, 6)] * micro_batches):
                model(x).sum().backward()
            finalize_model_grads([model])
            optimizer.step()
        assert [name.removeprefix("layers.") for name in names] == expected
    if not settings:
        described = model_facts(model.plan, model.module, micro_batches).units
        calls = [entry.calls for unit in described for entry in unit.traffic if entry.kind == "all-gather"]
        assert sum(calls) == len(expected)


@on_ranks(2)
def test_a_unit_without_backward_is_gathered_in_each_forward() -> None:
    stack = Stack(layers=4)
    stack.layers[0].weights_used_in_backward = False
    model = build("zero3", stack, unit_classes=(nn.Linear,), forward_prefetch=0, backward_prefetch=0)
    os.environ[POISONS] = "0"  # units take turns with a slot
    with _gathers() as names:
        for x in synced_last(model, [torch.ones(2, 6)] * 3):
            model(x).sum().backward()
        model.finish_grad_sync()
    planned = sum(entry.calls for entry in model.plan.traffic(3) if entry.kind == "all-gather")
    assert len(names) == planned == 1 + 3 * 4 + 3 * 2


@on_ranks(2)
def test_the_next_unit_of_the_last_step_is_gathered_ahead() -> None:
    model = _stacked()
    units = {unit.name: unit for unit in model.engine.units}
    is_ahead: list[bool] = []
    for layer, module in enumerate(model.module.layers[:3], start=1):  # type: ignore[index, arg-type]
        module.register_forward_hook(lambda *args, after=layer: is_ahead.append(units[f"layers.{after}"].is_gathered))
    model(torch.ones(2, 6)).sum().backward()
    model.zero_grad_buffer()
    model.engine.updated()
    del is_ahead[:]
    model(torch.ones(2, 6))
    assert is_ahead == [True, True, True]


def _gradients_in_order(kind: str, order: list[int]) -> dict[str, torch.Tensor]:
    """Returns gradients of the second step, in which units are gathered ahead."""
    module = Stack(layers=4)
    module.order = order
    model = build(kind, module, unit_classes=(nn.Linear,))
    os.environ[POISONS] = "0"
    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 6) + model.process_group.rank()).sum().backward()
        finalize_model_grads([model])
    return gradients(model)


@on_ranks(2)
def test_units_run_in_any_order() -> None:
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 0, 2], [0, 1, 0, 2, 3, 0]):
        assert_same(*(_gradients_in_order(kind, order) for kind in ("zero3", "ddp")))


def _kept(unit: Unit) -> list[torch.Tensor]:
    return [part.tensor for part in unit.parts if part.tensor is not None]


def _keeps_parts_among_neighbours(reshard: Any) -> list[tuple[str, int]]:
    """Returns what a micro-batch gathers, and from how many ranks; the numbers are those of one process."""
    model = _stacked(reshard_after_forward=reshard)
    expected, x = Stack(layers=4), torch.full((2, 6), 1.0 + dist.get_rank())
    with torch.no_grad():
        model(x)
    assert not any(map(_kept, model.engine.units))
    with model.no_sync():
        model(2.0 * x).sum().backward()
    found = []
    all_gather = collectives.all_gather

    def recorded(whole: torch.Tensor, own: torch.Tensor, group: Any, *sent_as: Any, what: str) -> None:
        found.append((what.removeprefix("the parameters of unit layers."), group.size()))
        all_gather(whole, own, group, *sent_as, what=what)

    with mock.patch.object(collectives, "all_gather", recorded):
        loss = model(x).sum()
        parts = {unit.name: [len(part) for part in _kept(unit)] for unit in model.engine.units if _kept(unit)}
        numel = model.plan.units[0].pieces[0].elements
        assert parts == ({f"layers.{layer}": [numel // 2] for layer in (0, 1)} if reshard == 2 else {})
        assert reshard != 2 or len(model.engine.held()["gathered parameters"]) == 3 + 2
        loss.backward()
    model.finish_grad_sync()
    assert not any(map(_kept, model.engine.units))
    for rank in range(4):
        for factor in (2.0, 1.0):
            expected(torch.full((2, 6), factor * (1.0 + rank))).sum().div(4).backward()
    assert_same_sums(gradients(model), gradients(expected), additions=15)  # as under FSDP2
    return found


def test_a_number_gathers_for_backward_from_that_many_ranks():
    for reshard, over in ((2, 2), (4, 4)):
        for found in run_distributed(_keeps_parts_among_neighbours, 4, reshard):
            assert found == [("2", 4), ("3", 4), ("1", over), ("0", over)]
    for found in run_distributed(_keeps_parts_among_neighbours, 4, 1):
        assert not found  # all is there since the first micro-batch


@on_ranks(4)
def test_the_description_says_among_how_many() -> None:
    model = _stacked(reshard_after_forward=2)
    facts = model_facts(model.plan, model.module, 1)
    assert {unit.after_forward for unit in facts.units} == {"1/2", "stays"}


@on_ranks(2)
def test_memory_for_gradients_of_layers_is_taken_once() -> None:
    model = _stacked()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    found: list[int] = []  # elements that each step allocates for whole gradients
    for _ in range(3):
        taken = mock.Mock(side_effect=lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device))
        for buffer in model.engine.buffers:
            buffer.grad_memory._allocate = taken
        model.zero_grad_buffer()
        model(torch.ones(2, 6)).sum().backward()
        finalize_model_grads([model])
        optimizer.step()
        found.append(sum(call.args[0] for call in taken.call_args_list))
    assert found[1] == found[2] == 128 < found[0]  # the root's alone: no other unit has its size


@on_ranks(2)
def test_settings_of_buckets_act_or_are_named() -> None:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build("zero3", toy(), bucket_size=50)
    said = "bucket_size: where parameters are sharded a unit is the bucket. No number changes"
    assert str(caught[0].message) == said


# ---- parameters that are kept in fp32 and cast: the bits are those of FSDP2, which does the same

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bf16": True}, {}),
    ({"bf16": True}, {"grad_reduce_in_fp32": True}),
    ({"bf16": True}, {"reduce_every_micro_batch": True}),
    ({"bf16": True}, {"activation_checkpointing": "full"}),
    ({"bf16": True, "calculate_per_token_loss": True}, {}),
    ({"bf16": True, "calculate_per_token_loss": True}, {"reduce_every_micro_batch": True}),
    ({"fp16": True}, {}),
    ({"fp16": True}, {"reduce_dtype": "bf16"}),
    ({}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}),
    ({}, {"reduce_dtype": "bf16"}),
]
"""Fields of the model's config, and of the wrapper's."""


def _train(kind: str, fields: dict[str, Any], settings: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses and norms of two steps, and all weights after them."""
    model = build(kind, toy(), config=SimpleNamespace(**fields), **settings)
    half = {name: fields.get(name, False) for name in ("bf16", "fp16")}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, clip_grad=0.5, initial_loss_scale=2.0**8, **half), [model]
    )
    seen = []
    for step in range(2):
        model.zero_grad_buffer()
        for tokens in synced_last(model, [batches(step)[0]] * 2):
            loss = loss_of(model, tokens)
            optimizer.scale_loss(loss).backward()
            seen.append(loss.detach())
        num_tokens = torch.tensor(7.0) if "calculate_per_token_loss" in fields else None
        finalize_model_grads([model], num_tokens)
        seen.append(torch.tensor(optimizer.step()[1]))
    with model.whole_parameters():
        weights = {
            name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
            for name, param in model.module.named_parameters()
        }
    return seen, weights


@pytest.mark.parametrize("num_ranks", quick([1, 2, 4], {1, 2}.__contains__))
@on_ranks("num_ranks")
def test_cast_parameters_give_the_bits_of_fsdp2(num_ranks):
    cases = CASES if num_ranks == 2 else CASES[::2]
    for fields, settings in cases:
        (expected, weights), (found, own) = (_train(kind, fields, settings) for kind in ("fsdp2", "zero3"))
        assert all(map(torch.equal, found, expected)), (fields, settings, found, expected)
        for name, weight in weights.items():
            assert own[name].dtype == weight.dtype == torch.float32, (fields, settings, name)
            assert torch.equal(own[name], weight), (fields, settings, name)


@on_ranks(1)
def test_a_module_that_keeps_its_buffers_keeps_their_dtype() -> None:
    for kind in ("zero3", "fsdp2"):
        module = toy(tied=False).bfloat16()
        module.offset = module.offset.float()
        module.blocks[0].register_buffer("total", torch.full((2,), 1.0 + 2**-20))
        module.blocks[0].buffers_keep_dtype = True
        model = build(kind, module)
        if kind == "zero3":  # torch casts all buffers of what it shards, as of a plain module
            model.bfloat16()  # parameters are in it already
            assert module.offset.dtype == torch.bfloat16
        assert torch.equal(module.blocks[0].total, torch.full((2,), 1.0 + 2**-20))


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_the_model_computes_in_its_dtype_and_shards_stay_fp32(kind: str) -> None:
    module, seen = toy(tied=False), {}
    policy = MixedPrecisionPolicy(torch.float16, output_dtype=torch.bfloat16)
    wrapper = FullyShardedDataParallel if kind == "zero3" else TorchFullyShardedDataParallel
    ddp_config, config = settings_of(kind), SimpleNamespace(fp16=True)
    model = wrapper(config, ddp_config, module, UNITS, process_group=dist.group.WORLD, mp_policy=policy)
    module.blocks[0].up.register_forward_hook(lambda m, args, out: seen.update(weight=m.weight.dtype, out=out.dtype))
    output = model(batches(0)[0])
    assert seen == {"weight": torch.float16, "out": torch.float16}
    assert output.dtype == torch.bfloat16
    assert {held.dtype for held in model.state_dict().values() if held.dtype != torch.float16} == {torch.float32}
    with model.whole_parameters():
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    if kind == "zero3":
        assert {param.dtype for param in model.parameters()} == {torch.float16}
        facts = {(piece.param_dtype, piece.gathered_dtype, piece.grad_dtype) for piece, *_ in model.plan.buffers}
        assert facts == {(torch.float32, torch.float16, torch.float16)}
