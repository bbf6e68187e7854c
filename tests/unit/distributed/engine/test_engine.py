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
KINDS: tuple[type, ...] = (
    FlatEngine,
    WholeParameters,
    ShardedParameters,
    FlatGradients,
    Fsdp2Engine,
    TorchParameters,
    TorchGradients,
)


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
    of_memory = {"free_gathered", "shards"}
    assert Engine.__abstractmethods__ == {"names_of_parameters", "prepare_direct_step"} | of_memory
    assert not any(kind.__abstractmethods__ for kind in KINDS)


def test_no_class_of_wrappers_or_engines_is_two_objects():
    files = Path(core.distributed.__file__).parent.rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(classes) > 30, "the classes were not found"
    methods = {node.name: sum(isinstance(entry, ast.FunctionDef) for entry in node.body) for node in classes}
    assert {name: number for name, number in methods.items() if number > 16} == {}


@pytest.mark.parametrize("interface", [Engine, Parameters, Gradients])
def test_overridden_methods_keep_their_arguments(interface: type) -> None:
    """No caller has to ask which engine it is."""
    kinds = [kind for kind in KINDS if issubclass(kind, interface)]
    methods = [name for name in vars(interface) if not name.startswith("_") and callable(getattr(interface, name))]
    overridden = [(kind, name) for kind in kinds for name in methods if name in vars(kind)]
    assert len(kinds) > 1 and len(overridden) > 3
    for kind, name in overridden:
        found, declared = (inspect.signature(getattr(of, name)) for of in (kind, interface))
        assert [*found.parameters][: len(declared.parameters)] == [*declared.parameters], (kind, name)


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
