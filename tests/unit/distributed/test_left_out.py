"""Parameters that settings leave out of sharding: replicated and ignored ones, under every wrapper."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import ParallelConfigError, WrapError
from core.base.parameters import local_part
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import finalize_model_grads
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Block, build, full, recorded_collectives, synced_last
from tests.unit.distributed._unused import Numbers, batches, optimizer_of, train_in_one_process, train_on_ranks

KINDS = ("ddp", "zero1", "zero2_overlap", "zero3", "fsdp2")
SHARDING = KINDS[1:]
VISION = ("vision.*", "blocks.1.up.*")


class Tower(nn.Module):
    """A unit inside of what is left out, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Block(), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x)) * self.scale


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.vision = Tower()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, sees: bool = True) -> Tensor:
        x = x + self.vision(x) if sees else x
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _use_of(skips: bool, step: int, rank: int) -> bool:
    """Says whether the model sees: with `skips` only one rank does after the first step."""
    return not skips or step == 0 or rank == 0


@functools.cache
def _serial(per_token: bool, skips: bool) -> Numbers:
    return train_in_one_process(Seeing(), functools.partial(_use_of, skips), scale=1 / 8 if per_token else 1 / 2)


def _trained(kind: str, per_token: bool, skips: bool, fields: dict[str, Any]) -> tuple[Any, Any, list[float]]:
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    model = build(kind, Seeing(), config=config, unit_classes=(Block, nn.Linear), **fields)
    return model, *train_on_ranks(model, functools.partial(_use_of, skips), num_tokens=4 if per_token else None)


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_replicated_parts_train_as_in_one_process(kind: str, skips: bool) -> None:
    replicated = ("vision.*",) if skips else VISION
    model, _, norms = _trained(kind, not skips, skips, {"replicated": replicated})
    expected_norms, expected = _serial(not skips, skips)
    assert norms == expected_norms
    assert_same(_weights(model), expected)


COUNTED = ("the parameters of", "the gradients of", "updated parameters")


@pytest.mark.parametrize("kind", SHARDING)
@on_ranks(2)
def test_replicated_parameters_are_reduced_once(kind: str) -> None:
    for patterns in (("*",), ("vision.*",)):
        model = build(kind, Seeing(), unit_classes=(Block,), replicated=patterns)
        optimizer = optimizer_of(model)
        batch, shapes = torch.ones(4, 7), {n: p.shape for n, p in Seeing().named_parameters()}
        with recorded_collectives() as recorded:
            for x in synced_last(model, [batch] * 2):
                model(x).backward()
            finalize_model_grads([model])
            optimizer.step()
        counted = Counter((kind, nbytes, ranks) for kind, what, nbytes, ranks in recorded if what.startswith(COUNTED))
        reduced = {key: count for key, count in counted.items() if key[0] != "all-gather"}
        planned = Counter()
        for entry in model.plan.traffic(2):
            planned[entry.kind, entry.nbytes, entry.ranks] += entry.calls
        assert reduced == {key: count for key, count in planned.items() if key[0] != "all-gather"}
        for unit in model.plan.units:
            of_unit = {entry.kind for entry in model.plan.traffic(2, unit)}
            assert not of_unit or (of_unit == {"all-reduce"}) == all(p.kind == "replicated" for p in unit.pieces)
        if patterns == ("*",):
            assert not [key for key in counted if key[0] == "all-gather"]
            parameters = dict(model.module.named_parameters())
            assert {name: local_part(p.detach()).shape for name, p in parameters.items()} == shapes


def _state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    moments = {f"optimizer.{name}": tensor for name, tensor in optimizer.state_tensors().items()}
    return {**model_state_dict(model.module), **moments}


@pytest.mark.parametrize(("kind", "other"), [("zero1", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "zero2_overlap")])
@on_ranks(2)
def test_checkpoints_of_replicated_parts_continue_elsewhere(kind: str, other: str, tmp_path: Path) -> None:
    model, optimizer, _ = _trained(kind, False, False, {"replicated": ("vision.*",)})
    save(_state(model, optimizer), tmp_path)
    loaded = build(other, Seeing(), unit_classes=(Block,), replicated=("head.*",))
    continued = optimizer_of(loaded)
    load(_state(loaded, continued), tmp_path)
    continued.load_state_scalars(optimizer.state_scalars())
    for each, by in ((model, optimizer), (loaded, continued)):
        each.zero_grad_buffer()
        each(batches(5, dist.get_rank())[0]).backward()
        finalize_model_grads([each])
        by.step()
    assert_same(_weights(loaded), _weights(model))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_ignored_parameters_are_left_to_the_caller(kind: str) -> None:
    plain, module = Seeing(), Seeing()
    rank = dist.get_rank()
    with torch.no_grad():
        module.vision.scale += rank  # not broadcast
    model = build(kind, module, unit_classes=(Block,), ignored=("vision.scale", "vision.out.*", "head.bias"))
    optimizer = optimizer_of(model)
    ignored = {name: module.get_parameter(name) for name in ("vision.scale", "vision.out.weight", "head.bias")}
    before = {name: parameter.detach().clone() for name, parameter in ignored.items()}
    batch = batches(0, rank)[0]
    for step in range(2):
        model.zero_grad_buffer()
        model(batch).backward()
        if not step:
            plain.vision.scale.data += rank
            plain(batch).backward()
            for name, parameter in ignored.items():
                assert type(parameter) is nn.Parameter and module.get_parameter(name) is parameter
                assert torch.equal(parameter.grad, plain.get_parameter(name).grad)
        kept = {name: parameter.grad.clone() for name, parameter in ignored.items()}
        finalize_model_grads([model])
        optimizer.step()
        for name, parameter in ignored.items():
            assert torch.equal(parameter, before[name])
            assert torch.equal(parameter.grad, kept[name])
    assert set(model.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_unfit_patterns_are_refused(kind: str) -> None:
    def message(module: nn.Module, **fields: Any) -> str:
        with pytest.raises((ParallelConfigError, WrapError)) as caught:
            build(kind, module, unit_classes=(Block,), **fields)
        return str(caught.value)

    tied = Seeing()
    tied.vision.out.weight = tied.vision.block.twin = nn.Parameter(torch.ones(7, 7))
    assert message(Seeing(), replicated=("visoin.*",)).startswith(
        "replicated has the pattern 'visoin.*', which matches"
    )
    of_tie = message(tied, ignored=("vision.out.*",))
    assert of_tie.startswith("ignored matches vision.out.weight and not vision.block.twin, which are one tied")
    both = message(Seeing(), replicated=("head.*",), ignored=("*.bias",))
    assert both == "parameter head.bias is named by replicated and by ignored; drop one"
    assert "on the meta device" in message(Seeing().to("meta"), ignored=("head.*",))
    stage = Seeing()
    stage.config = SimpleNamespace(pipeline_model_parallel_size=2)
    build(kind, stage, unit_classes=(Block,), replicated=("of another stage.*",))
    stage = Seeing()
    stage.config, stage.head.weight.shared_embedding = SimpleNamespace(pipeline_model_parallel_size=2), True
    assert "a weight of two pipeline stages" in message(stage, replicated=("head.*",))
    if kind != "ddp":
        config = {"reproducible_across_ranks": True, "replicated": ("head.*",)}
        assert message(Seeing(), **config).endswith("replicated parameters are reduced by themselves; drop replicated")
    if kind == "fsdp2":
        assert "module 'head' holds" in message(Seeing(), replicated=("head.bias",))
