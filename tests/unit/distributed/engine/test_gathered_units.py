"""Modules that a part of the ranks does not run, or whose output they do not use: the numbers of one process."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import UnitError
from core.distributed import finalize_model_grads
from core.distributed.engine.gathered_units import _GraphMark
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Block, build, full, recorded_collectives
from tests.unit.distributed._unused import Numbers, optimizer_of, train_in_one_process, train_on_ranks

GATHERS: dict[str, Any] = {"gather_skipped_units": True}

Case = tuple[str, str, dict[str, Any]]
"""Where the tower runs, what becomes of it on one rank, and the wrapper's settings."""

WHOLE: list[Case] = [("between", "skipped", {}), ("before", "unused", {})]
SHARDED: list[Case] = [
    *(("before", "unused", fields) for fields in ({}, {"reshard_after_forward": False})),
    ("between", "unused", {}),
    ("between", "unused", {"forward_prefetch": 0, "backward_prefetch": 0}),
    ("after", "unused", {"reduce_every_micro_batch": True}),
    ("between", "times 0", {}),
    ("between", "skipped", {"unit_classes": ()}),  # with all parameters in the unit of the model itself
    ("before", "skipped", GATHERS),
    ("between", "skipped", GATHERS | {"forward_prefetch": 3, "backward_prefetch": 3}),
    ("after", "skipped", GATHERS | {"reduce_every_micro_batch": True}),
    ("before", "skipped at once", GATHERS),
    ("before, scaled", "skipped at once", GATHERS),
    ("by name", "skipped", GATHERS | {"forward_methods": ("called",)}),
]


class Named(Block):
    def called(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Seeing(nn.Module):
    """Blocks of one size, of which a tower of three runs before, between (also by another method) or after others."""

    def __init__(self, place: str = "between") -> None:
        super().__init__()
        torch.manual_seed(1)
        parts = {"before": (0, 2), "after": (2, 0)}.get(place.partition(",")[0], (1, 1))
        # With it the first unit's input has a gradient.
        self.scale = nn.Parameter(torch.ones(7)) if "scaled" in place else 1.0
        self.first = nn.ModuleList([Block() for _ in range(parts[0])])
        self.tower = nn.ModuleList([Named() if place == "by name" else Block() for _ in range(3)])
        self.last = nn.ModuleList([Block() for _ in range(parts[1])])
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, tower: str = "used") -> Tensor:
        x = _run(self.first, self.scale * x)
        if not tower.startswith("skipped"):
            seen = _run(self.tower, 2.0 * x)  # so that the tower has a gradient of its own to add to that of x
            x = x + {"used": seen, "unused": 0.0, "times 0": 0.0 * seen}[tower]
            del seen
        return self.head(_run(self.last, x)).square().mean()


def _run(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = getattr(block, "called", block)(x)
    return x


def _tower_of(how: str, step: int, rank: int) -> str:
    """Returns what becomes of the tower: in the first step both may use it, then one rank does not, then the other."""
    return how if (step or how == "skipped at once") and (rank + step) % 2 else "used"


@functools.cache
def _serial(place: str, how: str) -> Numbers:
    return train_in_one_process(Seeing(place), functools.partial(_tower_of, how))


@pytest.mark.parametrize(
    ("kind", "cases"), [("ddp", WHOLE), ("zero2_overlap", WHOLE), ("zero3", SHARDED), ("fsdp2", SHARDED)]
)
@on_ranks(2)
def test_ranks_that_skip_a_tower_train_as_one_process(kind: str, cases: list[Case]) -> None:
    for place, how, fields in cases:
        model = build(kind, Seeing(place), config=SimpleNamespace(), **({"unit_classes": (Block,)} | fields))
        _, norms = train_on_ranks(model, functools.partial(_tower_of, how))
        weights = {name: full(tensor) for name, tensor in model.state_dict().items()}
        expected_norms, expected = _serial(place, how)
        wrong = [name for name, weight in expected.items() if not torch.equal(weights[name], weight)]
        if fields.get("reduce_every_micro_batch"):  # another order: by some eps of a step of 0.05
            for name in wrong:
                torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-6)
        else:
            assert (wrong, norms) == ([], expected_norms), (place, how, fields)


def _counted(kind: str, fields: dict[str, Any], tower: str) -> list[Counter[str]]:
    """Returns the collectives of units in each step, of which the first uses the tower."""
    model, found = build(kind, Seeing(), unit_classes=(Block,), **fields), list[Counter[str]]()
    optimizer = optimizer_of(model)
    for step in range(4):
        with recorded_collectives() as recorded:
            model.zero_grad_buffer()
            model(torch.ones(2, 7), tower if step else "used").backward()
            finalize_model_grads([model])
            optimizer.step()
        found.append(Counter(what for _, what, *_ in recorded if "unit" in what))
    return found


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_ranks_that_agree_send_nothing_more(kind: str) -> None:
    assert _counted(kind, GATHERS, "used") == _counted(kind, {}, "used")
    dropped = _counted(kind, {}, "skipped")[-1]
    assert not [what for what in dropped if what.startswith("the parameters of unit tower")]
    assert [what for what in dropped if what.startswith("the parameters of unit last")]
    assert _counted(kind, GATHERS, "skipped")[-1] == _counted(kind, {}, "used")[-1]


class Generating(Seeing):
    def generate(self, x: Tensor, towers: list[str]) -> list[Tensor]:
        return [self(x, tower) for tower in towers]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_ranks_skip_units_in_each_forward_of_a_named_method(kind: str) -> None:
    x, towers = torch.ones(2, 7), [["used", "skipped", "used"], ["skipped", "skipped", "used"]][dist.get_rank()]
    model = build(kind, Generating(), unit_classes=(Block,), forward_methods=("generate",), **GATHERS)
    with torch.no_grad():
        for _ in range(2):
            assert model.module.generate(x, towers) == Generating().generate(x, towers)


class Forwarding(Seeing):
    def generate(self, x: Tensor, towers: list[str]) -> list[Tensor]:
        return [self.forward(x, tower) for tower in towers]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_a_unit_runs_alone_after_a_forward_that_raised(kind):
    x, methods = torch.ones(2, 7), {"forward_methods": ("generate",)}
    model = build(kind, Forwarding(), unit_classes=(Block,), **GATHERS, **methods)
    with torch.no_grad():
        for call in (model, lambda x, tower: model.module.generate(x, [tower])):
            with pytest.raises(KeyError, match="unknown"):
                call(x, "unknown")
            assert torch.equal(model.module.first[0](x), Seeing().first[0](x))
        with pytest.raises(UnitError, match=r"once in a call of the model \(self\(...\), not self.forward\(...\)\)"):
            model.module.generate(x, ["used", "used"])


class Unordered(nn.Module):
    def __init__(self, nests: bool) -> None:
        super().__init__()
        self.first, self.last = Block(), nn.Sequential(Block())
        self.nests = nests

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).sum() if self.nests else self.first(self.last(x)).sum()


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(1)
def test_units_out_of_order_cannot_be_skipped(kind: str) -> None:
    for nests, said in ((False, r"unit first runs after unit last"), (True, r"unit last.0 runs after unit last,")):
        module = Unordered(nests)
        units = (module.first, module.last, *(module.last if nests else ()))
        model = build(kind, module, unit_classes=units, **GATHERS)
        with pytest.raises(UnitError, match=said):
            model(torch.ones(2, 7))


class Passing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x


@on_ranks(1)
def test_a_kept_graph_holds_no_mark_of_later_forwards() -> None:
    for kind in ("zero3", "fsdp2"):
        model = build(kind, Seeing(), unit_classes=(Block,))
        kept = [model(torch.ones(2, 7))]
        for _ in range(4):
            model(torch.ones(2, 7))
        marks = sum(isinstance(each, _GraphMark) for each in gc.get_objects())
        assert kept and 0 < marks <= 2 * 5, (kind, marks)  # of 5 units, in the kept graph and in the last one
        del kept


@on_ranks(1)
def test_units_may_return_inputs_without_gradients() -> None:
    for kind in ("zero3", "fsdp2"):
        model = build(kind, nn.Sequential(Passing(), Block()), unit_classes=(Block, Passing))
        given = 2 * torch.ones(2, 7, requires_grad=True)  # under no_grad its product has no graph
        with torch.no_grad():
            model(given)
