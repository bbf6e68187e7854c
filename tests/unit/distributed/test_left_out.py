"""Parameters that settings leave out of sharding: replicated and ignored ones, under every wrapper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import ParallelConfigError, WrapError
from core.base.parameters import local_part
from core.comm.call import Collective, CollectiveRecord
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import finalize_model_grads
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import Block, build, full
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


def _serial(per_token: bool, skips: bool) -> Numbers:
    return train_in_one_process(Seeing(), partial(_use_of, skips), scale=1 / 8 if per_token else 1 / 2)


def _trained(kind: str, per_token: bool, skips: bool, fields: dict[str, Any]) -> tuple[Any, Any, list[float]]:
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    model = build(kind, Seeing(), config=config, unit_classes=(Block, nn.Linear), **fields)
    return model, *train_on_ranks(model, partial(_use_of, skips), num_tokens=4 if per_token else None)


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def _train_cases(kind: str, skips: bool) -> list[Any]:
    found = []
    for per_token in (False, True):
        model, _, norms = _trained(kind, per_token, skips, {"replicated": ("vision.*",) if skips else VISION})
        found.append((norms, _weights(model)))
    return found


def _assert_equal(found: Numbers, expected: Numbers) -> None:
    assert found[0] == expected[0]
    assert [name for name, weight in expected[1].items() if not torch.equal(found[1][name], weight)] == []


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_replicated_parts_train_as_in_one_process(kind, skips):
    for found in run_distributed(_train_cases, 2, kind, skips):
        for per_token, case in zip((False, True), found, strict=True):
            _assert_equal(case, _serial(per_token, skips))


@contextmanager
def _counted() -> Iterator[Counter[tuple[str, int, int]]]:
    """Counts collectives of parameters and gradients over several ranks, by kind, bytes and ranks."""
    counted: Counter[tuple[str, int, int]] = Counter()
    collective = CollectiveRecord.collective

    def note(record: CollectiveRecord, kind: str, what: str, nbytes: int, **options: Any) -> Collective:
        if record.num_ranks > 1 and what.startswith(("the parameters of", "the gradients of", "updated parameters")):
            counted[kind, nbytes, record.num_ranks] += 1
        return collective(record, kind, what, nbytes, **options)

    with mock.patch.object(CollectiveRecord, "collective", note):
        yield counted


def _counts_traffic(kind: str) -> None:
    for patterns in (("*",), ("vision.*",)):
        model = build(kind, Seeing(), unit_classes=(Block,), replicated=patterns)
        optimizer = optimizer_of(model)
        batch, shapes = torch.ones(4, 7), {n: p.shape for n, p in Seeing().named_parameters()}
        with _counted() as counted:
            with model.no_sync():
                model(batch).backward()
            model(batch).backward()
            finalize_model_grads([model])
        reduced = {key: count for key, count in counted.items() if key[0] != "all-gather"}
        planned = Counter()
        for entry in model.plan.traffic(2):
            planned[entry.kind, entry.nbytes, entry.ranks] += entry.calls
        assert reduced == {key: count for key, count in planned.items() if key[0] != "all-gather"}
        for unit in model.plan.units:
            of_unit = {entry.kind for entry in model.plan.traffic(2, unit)}
            assert not of_unit or (of_unit == {"all-reduce"}) == all(p.kind == "replicated" for p in unit.pieces)
        if patterns == ("*",):
            optimizer.step()
            assert not [key for key in counted if key[0] == "all-gather"]
            parameters = dict(model.module.named_parameters())
            assert {name: local_part(p.detach()).shape for name, p in parameters.items()} == shapes


@pytest.mark.parametrize("kind", SHARDING)
def test_replicated_parameters_are_reduced_once(kind):
    run_distributed(_counts_traffic, 2, kind)


def _state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    moments = {f"optimizer.{name}": tensor for name, tensor in optimizer.state_tensors().items()}
    return {**model_state_dict(model.module), **moments}


def _continues(kind: str, other: str, folder: str) -> tuple[Any, Any]:
    model, optimizer, _ = _trained(kind, False, False, {"replicated": ("vision.*",)})
    save(_state(model, optimizer), folder)
    loaded = build(other, Seeing(), unit_classes=(Block,), replicated=("head.*",))
    continued = optimizer_of(loaded)
    load(_state(loaded, continued), folder)
    continued.load_state_scalars(optimizer.state_scalars())
    found = []
    for each, by in ((model, optimizer), (loaded, continued)):
        each.zero_grad_buffer()
        each(batches(5, dist.get_rank())[0]).backward()
        finalize_model_grads([each])
        by.step()
        found.append(_weights(each))
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "other"), [("zero1", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "zero2_overlap")])
def test_checkpoints_of_replicated_parts_continue_elsewhere(kind, other, tmp_path: Path):
    for first, second in run_distributed(_continues, 2, kind, other, str(tmp_path)):
        assert [name for name, weight in first.items() if not torch.equal(second[name], weight)] == []


def _leaves_alone(kind: str) -> None:
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
def test_ignored_parameters_are_left_to_the_caller(kind):
    run_distributed(_leaves_alone, 2, kind)


def _refuses(kind: str) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
def test_unfit_patterns_are_refused(kind):
    run_distributed(_refuses, 1, kind)
