"""The interface of an engine means the same under both."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import core
from core.distributed import finalize_model_grads
from core.distributed.engine.engine import Engine, Gradients, Parameters
from core.distributed.flat.flat_engine import FlatEngine, FlatGradients
from core.distributed.flat.sharded_parameters import ShardedParameters
from core.distributed.flat.whole_parameters import WholeParameters
from core.distributed.fsdp2.fsdp2_engine import Fsdp2Engine, TorchGradients, TorchParameters
from tests.unit._quick import quick
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import WRAPPERS, accumulate, build, full, toy

ENGINES = {"ddp": FlatEngine, "zero1": FlatEngine, "zero2": FlatEngine, "zero3": FlatEngine, "fsdp2": Fsdp2Engine}


@pytest.mark.parametrize("kind", ENGINES)
@on_ranks(2)
def test_units_are_the_plans_and_the_root_is_last(kind: str) -> None:
    model = build(kind, toy())
    units = [getattr(unit, "plan", unit) for unit in model.engine.units]  # FSDP2's are the plan's own
    assert type(model.engine) is ENGINES[kind] and tuple(units) == model.plan.units
    assert units[-1].modules == (model.module,)


@pytest.mark.parametrize("kind", ENGINES)
@on_ranks(2)
def test_gradients_of_all_ranks_are_the_whole_gradient(kind: str) -> None:
    model, reference = build(kind, toy(tied=False)), build("ddp", toy(tied=False))
    for wrapped in (model, reference):
        accumulate(wrapped)
        finalize_model_grads([wrapped])
    trained = [p for p in model.module.parameters() if p.requires_grad]
    total = torch.stack([model.engine.gradients.of(p).double().sum() for p in trained])
    dist.all_reduce(total)
    copies = 2.0 if kind == "ddp" else 1.0  # every rank has the whole gradient
    whole = [full(p.main_grad).double() for p in reference.module.parameters() if p.requires_grad]
    for found, gradient in zip(total / copies, whole, strict=True):
        # Sums in double, in another order: as many roundings as elements.
        bound = gradient.abs().sum() * gradient.numel() * torch.finfo(torch.float64).eps
        assert abs(found - gradient.sum()) <= bound


def test_both_engines_have_all_that_callers_use():
    assert Parameters.__abstractmethods__ == {"settle", "receivers", "held"}
    assert Gradients.__abstractmethods__ == {"reopen", "finish", "zero", "held"}
    assert Engine.__abstractmethods__ == {"names_of_parameters", "prepare_direct_step"}
    kinds = (
        FlatEngine,
        WholeParameters,
        ShardedParameters,
        FlatGradients,
        Fsdp2Engine,
        TorchParameters,
        TorchGradients,
    )
    assert not any(kind.__abstractmethods__ for kind in kinds)


def test_no_class_of_an_engine_or_a_plan_is_two_objects():
    rooms = [Path(core.distributed.__file__).parent / name for name in ("engine", "flat", "fsdp2", "plan")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for room in rooms for file in room.glob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(classes) > 30, "the classes were not found"
    methods = {node.name: sum(isinstance(entry, ast.FunctionDef) for entry in node.body) for node in classes}
    assert {name: number for name, number in methods.items() if number > 16} == {}


@pytest.mark.parametrize("kind", ENGINES)
@on_ranks(2)
def test_callers_need_no_more_than_the_interface(kind: str) -> None:
    engine = build(kind, toy()).engine
    for part, interface in ((engine.parameters, Parameters), (engine.gradients, Gradients)):
        assert isinstance(part, interface)
        overridden = [name for name in vars(interface) if not name.startswith("_") and name in vars(type(part))]
        for name in overridden:  # with the same arguments, so that no caller asks which engine it is
            found, declared = (inspect.signature(getattr(of, name)) for of in (type(part), interface))
            assert [*found.parameters][: len(declared.parameters)] == [*declared.parameters], name


@pytest.mark.parametrize("kind", quick(WRAPPERS, lambda kind: kind not in ("ddp_overlap", "zero1")))
@on_ranks(2)
def test_every_engine_has_the_verbs_of_its_plan(kind: str) -> None:
    model = build(kind, toy(tied=False))
    part, planned = model.plan.shard_index, {p.name: p for unit in model.plan.units for p in unit.params}
    cuts = model.plan.shards_parameters
    for name, parameter in model.module.named_parameters():
        bounds = planned[name].bounds
        held = bounds[part + 1] - bounds[part] if cuts else bounds[-1]
        assert model.engine.parameters.shard(parameter).numel() == held
    accumulate(model)
    assert sum(tensor.numel() for tensor in model.engine.held()["gradients"])
    finalize_model_grads([model])
    for name, parameter in model.module.named_parameters():
        gradient = model.local_gradient(parameter)
        assert (gradient is not None) == parameter.requires_grad
        if gradient is not None:
            bounds = planned[name].bounds
            assert gradient.numel() == bounds[part + 1] - bounds[part]
    model.engine.gradients.recover()  # of nothing: gradients stay
    assert model.step.is_reduced
    model.engine.parameters.settle()
    with model.whole_parameters():
        assert_same({n: full(p) for n, p in model.module.named_parameters()}, dict(toy(tied=False).named_parameters()))
