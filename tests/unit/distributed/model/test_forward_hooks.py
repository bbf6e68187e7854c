"""Weights that backward reads on another path than the output of their unit, under wrappers that free units."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import WrapError, warn_once
from core.distributed import finalize_model_grads
from core.distributed.flat.unit import POISONS
from core.distributed.model.forward_hooks import SavedWeights, keep
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._rounding import assert_same
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import build, full, gradients, synced_last

WIDTH = 6


class Layer(nn.Module):
    """A layer; those of a model are equal, so that they take turns with one memory."""

    def __init__(self, computes: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.computes = computes

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


class Model(nn.Module):
    def __init__(self, name: str, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.case = CASES[name]
        self.layers = nn.ModuleList([Layer(self.case.layer) for _ in range(num_layers)])
        self.head = nn.Linear(WIDTH, 3)
        for layer in self.layers if self.case.frozen else ():
            (layer if self.case.frozen == "all" else layer.get_submodule(self.case.frozen)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.case.forward(self, x)


# ---- what layers compute


def _plain(layer: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(layer.up(x))


def _routes(layer: Any, x: Tensor) -> Tensor:
    y = _plain(layer, x)
    layer.loss = layer.router(y).softmax(-1).square().mean()
    return y


def _returns_a_view(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return _plain(layer, x), layer.router.weight[:2]


def _keeps_a_view(layer: Any, x: Tensor) -> Tensor:
    layer.view = layer.router.weight[:2]
    return _plain(layer, x)


def _writes_its_activation(layer: Any, x: Tensor) -> Tensor:
    y = torch.sigmoid(layer.up(x))
    y.add_(1.0)  # sigmoid's backward reads what is written here
    return x + y


def _differentiates(layer: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: torch.tanh(layer.up(y)).sum())(x)


def _assigns(layer: Any, x: Tensor) -> Tensor:
    layer.up.weight.data = nn.functional.normalize(layer.up.weight.data)
    return _plain(layer, x)


class Kernel(torch.autograd.Function):
    """A product as an extension in C++ computes it: it keeps the weight itself, and no class of it is asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return gradient @ ctx.weight, gradient.t() @ x


def _calls_a_kernel(layer: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(Kernel.apply(x, layer.up.weight) + layer.up.bias)


# ---- what models do with them


def _use_table(layer: Any, x: Tensor) -> Tensor:
    y, table = layer(x)
    return y * table.sum(0)


def _use_kept_view(layer: Any, x: Tensor) -> Tensor:
    y = layer(x)
    return y * layer.view.sum(0) + (layer.view.sin() * x[:2]).mean()


def _read_layer(layer: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(nn.functional.linear(x, layer.up.weight, layer.up.bias))


def _penalty(model: Any) -> Any:
    return sum(0.1 * layer.up.weight.square().sum() for layer in model.layers)


def _run(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = model.case.step(layer, x)
    return model.head(x).square().mean() + model.case.extra(model)


def _use_tables_later(model: Any, x: Tensor) -> Tensor:
    tables = []
    for layer in model.layers:
        x, table = layer(x)
        tables.append(table)
    return model.head(x).square().mean() + sum((table.sin() * x[:2]).mean() for table in tables)


def _write_tables(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x, table = layer(x)
        with torch.no_grad():
            table.add_(0.5)
    return model.head(x).square().mean()


def _differentiate_twice(model: Any, x: Tensor) -> Tensor:
    loss = _run(model, x.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


@dataclass(frozen=True)
class Case:
    """What a layer computes, what the model does with each, and what it adds to the loss."""

    layer: Callable[[Any, Tensor], Any] = _plain
    step: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x)
    extra: Callable[[Any], Any] = lambda model: 0.0
    forward: Callable[[Any, Tensor], Tensor] = _run
    frozen: str = ""
    """What no gradient is computed of: a module of each layer, "all" of it, or nothing."""


_ROUTED = Case(_routes, extra=lambda model: sum(layer.loss for layer in model.layers))  # how routers are balanced
_TABLES_LATER = Case(_returns_a_view, forward=_use_tables_later)
_OBJECTS = Case(lambda layer, x: SimpleNamespace(value=_plain(layer, x)), lambda layer, x: layer(x).value)

READ_IN_UNITS = {
    "Routed": _ROUTED,
    "FrozenRouters": replace(_ROUTED, frozen="router"),
    "TablesAtOnce": Case(_returns_a_view, _use_table),
    "TablesLater": _TABLES_LATER,
    "FrozenTables": replace(_TABLES_LATER, frozen="all"),
    "Objects": _OBJECTS,  # in which torch's pytree finds no tensor
    "FrozenObjects": replace(_OBJECTS, frozen="all"),
    "KeptViews": Case(_keeps_a_view, _use_kept_view),
    "Kernels": Case(_calls_a_kernel),
}
"""Models that read weights of units in the forwards of the units, or through what these leave behind."""

READ_BY_PARENTS = {
    "Penalised": Case(extra=_penalty),
    "PenalisedBefore": Case(forward=lambda model, x: _penalty(model) + _run(model, x)),
    "ParentReads": Case(step=_read_layer),  # as `nn.MultiheadAttention` reads its children's weights
    "FrozenParentReads": Case(step=_read_layer, frozen="all"),
}
RAISE = {
    "WrittenTables": Case(_returns_a_view, forward=_write_tables, frozen="all"),
    "WrittenActivation": Case(_writes_its_activation),
    "Differentiated": Case(_differentiates),
    "TwiceDifferentiated": Case(forward=_differentiate_twice),
    "Assigned": Case(_assigns),  # as layers with a largest norm do
}
CASES = READ_IN_UNITS | READ_BY_PARENTS | RAISE | {"Plain": Case()}
RECOMPUTED = ("Routed", "FrozenRouters")


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def _trains(kind: str, name: str, settings: dict[str, Any]) -> dict[str, Tensor] | str:
    """Returns the weights after two steps of SGD, or the error."""
    poisons = settings.get("poisons", "0")  # 0: what is read too late has another unit's values
    settings = {name: value for name, value in settings.items() if name != "poisons"}
    model = build(kind, Model(name), unit_classes=(Layer,), **settings)
    os.environ[POISONS] = poisons
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.05, clip_grad=0.0), [model])
    rank = model.process_group.rank()
    try:
        for step in range(2):
            model.zero_grad_buffer()
            for number in synced_last(model, (step, step + 5)):
                model(batch(rank, number)).backward()
            finalize_model_grads([model])
            optimizer.step()
        return {name: full(tensor) for name, tensor in model.module.state_dict().items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _train_all(kind: str, names: tuple[str, ...], settings: dict[str, Any]) -> dict[str, Any]:
    return {name: _trains(kind, name, settings) for name in names}


@functools.cache
def outcomes(kind: str, names: tuple[str, ...] = tuple(CASES), **settings: Any) -> list[dict[str, Any]]:
    return run_distributed(_train_all, 2, kind, names, settings)


def assert_same_as_replicas(name: str, kind: str, *names: tuple[str, ...], **settings: Any) -> None:
    expected = outcomes("ddp")[0][name]
    for found in (outcome[name] for outcome in outcomes(kind, *names, **settings)):
        assert not isinstance(found, str), found
        assert_same(found, expected)


@pytest.mark.parametrize("name", READ_IN_UNITS)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_weights_read_on_another_path_are_the_units_own(kind, name):
    assert_same_as_replicas(name, kind)


@pytest.mark.parametrize("name", (*READ_IN_UNITS, *READ_BY_PARENTS))
@pytest.mark.parametrize(
    "settings",
    [{"forward_prefetch": 0, "backward_prefetch": 0}, {"activation_checkpointing": "full"}, {"poisons": "1"}],
    ids=["no prefetch", "recomputed", "poisoned"],
)
@pytest.mark.long
def test_settings_change_no_weight_that_is_read(settings, name):
    assert_same_as_replicas(name, "zero3", **settings)


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_a_loss_in_an_attribute_of_a_recomputed_unit_is_right(kind, name):
    assert_same_as_replicas(name, kind, RECOMPUTED, activation_checkpointing="full")


class OwnParameter(nn.Parameter):
    """A class of parameters, which may depend on its class: no reader can be made to wait for it."""


@on_ranks(2)
def test_own_classes_of_parameters_are_refused() -> None:
    model = Model("Plain")
    model.layers[1].up.weight = OwnParameter(model.layers[1].up.weight.detach())
    with pytest.raises(WrapError, match=r"^parameter layers.1.up.weight is a OwnParameter"):
        build("zero3", model, unit_classes=(Layer,))


@pytest.mark.parametrize("name", READ_BY_PARENTS)
def test_a_parent_may_read_weights_of_its_units(name):
    assert_same_as_replicas(name, "zero3")
    for found in outcomes("fsdp2"):
        assert re.search("was used outside the forward of its unit|mixed torch.Tensor and DTensor", found[name])


MESSAGES = {
    "Assigned": "was written while its unit was gathered|the storage of parameter .* was replaced",
    "WrittenTables": "was written while its unit was gathered",
    "WrittenActivation": "has been modified by an inplace operation",
    "Differentiated": "don't yet support saved tensor hooks",
    "TwiceDifferentiated": "has been modified by an inplace operation|a backward with create_graph=True reached unit",
}


@pytest.mark.parametrize("name", RAISE)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_reads_that_cannot_be_served_raise(kind, name):
    for found in outcomes(kind):
        assert isinstance(found[name], str) and re.search(MESSAGES[name], found[name])


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_units_whose_weights_are_in_use_keep_memory(kind: str) -> None:
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("KeptViews", "Routed"):  # units that leave views of weights, and units that do not
            build(kind, Model(name, 5), unit_classes=(Layer,))(batch(0, 0))
    said = [str(warning.message) for warning in caught if "reshard_overrides" in str(warning.message)]
    units = [message.split()[3] for message in said]
    assert units[:3] == ["layers.0", "layers.1", "layers.2"] and len(units) == len(set(units))


def _gradients_after(kind: str, evaluates: bool) -> dict[str, Tensor]:
    """Returns the gradients of a step, after an evaluation in which units keep their memory."""
    model = build(kind, Model("KeptViews"), unit_classes=(Layer,))
    if evaluates:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(batch(dist.get_rank(), 1))
    model(batch(dist.get_rank(), 0)).backward()
    finalize_model_grads([model])
    return gradients(model)


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_memory_kept_in_inference_mode_can_be_trained_in(kind: str) -> None:
    assert_same(_gradients_after(kind, True), _gradients_after(kind, False))


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(2)
def test_hooks_end_with_a_forward_that_raises(kind: str) -> None:
    model = build(kind, Model("Plain"), unit_classes=(Layer,))
    for error in (ValueError, KeyboardInterrupt):
        with mock.patch.object(Layer, "forward", side_effect=error), pytest.raises(error):
            model(batch(0, 0))
        model.zero_grad_buffer()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _inside_hooks(kind: str) -> tuple[int, dict[str, Tensor]]:
    """Returns how many tensors a user's own hooks packed in a routed model's forward, and its gradients."""
    model = build(kind, Model("Routed"), unit_classes=(Layer,))
    os.environ[POISONS] = "0"
    packed = mock.Mock(side_effect=lambda tensor: tensor.detach().clone())
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        loss = model(batch(dist.get_rank(), 0))
    loss.backward()
    finalize_model_grads([model])
    return packed.call_count, gradients(model)


@on_ranks(2)
def test_hooks_of_the_user_get_all_other_tensors() -> None:
    in_all, expected = _inside_hooks("ddp")
    for kind in ("zero3", "fsdp2"):
        packed, found = _inside_hooks(kind)
        assert in_all / 2 < packed < in_all  # each layer saves a few weights too
        assert_same(found, expected)


class _Graph(nn.Module):
    """Multiplies by a weight and by a constant, which autograd saves in its layout."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        graph = torch.rand(16, 16)
        self.graph = graph if layout == torch.strided else (graph * (graph > 0.5)).to_sparse(layout=layout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.graph @ (x @ self.weight))


def _graphs(layout: torch.layout) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*[_Graph(layout) for _ in range(3)])


@on_ranks(2)
def test_tensors_of_other_layouts_are_saved_as_they_are() -> None:
    cases: dict[str, list[dict[str, Any]]] = {
        "ddp": [{"offload_activations": True}],
        "zero3": [{}, {"offload_activations": True}, {"activation_checkpointing": "full"}],
        "fsdp2": [{}, {"offload_activations": True}],
    }
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        plain = _graphs(layout)
        plain(x).square().mean().backward()
        for kind, of_kind in cases.items():
            for settings in of_kind:
                model = build(kind, _graphs(layout), unit_classes=(_Graph,), **settings)
                model(x).square().mean().backward()
                finalize_model_grads([model])
                found = gradients(model)
                for name, parameter in plain.named_parameters():  # the mean of two equal gradients is exact
                    assert torch.equal(found[name], parameter.grad), (layout, kind, settings, name)


def test_a_tensor_of_another_backend_is_kept() -> None:
    saved = SavedWeights(lambda: [torch.zeros(2)], lambda: None)
    saved.begin()
    saved.end()
    dense = torch.randn(4, 4)
    assert saved._place(dense.to_mkldnn()) is None  # it is no weight
    tensor, _ = keep(dense.to_mkldnn())
    assert tensor.layout == torch._mkldnn and torch.equal(tensor.to_dense(), dense)
