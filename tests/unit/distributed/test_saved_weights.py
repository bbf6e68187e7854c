"""Weights that backward reads on another path than the output of their unit, under wrappers that free units."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.base.errors import WrapError, warn_once
from core.distributed import finalize_model_grads
from core.distributed.engine.unit import POISONS
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import build, full, gradients

WIDTH = 6


class Layer(nn.Module):
    """A layer; those of a model are equal, so that they take turns with one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.up(x))


class Model(nn.Module):
    layer: type[Layer] = Layer

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([self.layer() for _ in range(num_layers)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.step(layer, x)
        return self.head(x).square().mean() + self.extra()

    def step(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x)

    def extra(self) -> Any:
        return 0.0


class RoutedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = self.router(y).softmax(-1).square().mean()
        return y


class Routed(Model):
    """A loss of each layer, which the layer keeps and the model adds up: how routers are balanced."""

    layer = RoutedLayer

    def extra(self) -> Any:
        return sum(layer.loss for layer in self.layers)


class FrozenRouters(Routed):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.router.weight.requires_grad_(False)


class TableLayer(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.router.weight[:2]


class TablesAtOnce(Model):
    """Layers that return a view of a weight, which the model uses before the next layer runs."""

    layer = TableLayer

    def step(self, layer: Any, x: Tensor) -> Tensor:
        y, table = layer(x)
        return y * table.sum(0)


class TablesLater(Model):
    layer = TableLayer

    def forward(self, x: Tensor) -> Tensor:
        tables = []
        for layer in self.layers:
            x, table = layer(x)
            tables.append(table)
        return self.head(x).square().mean() + sum((table.sin() * x[:2]).mean() for table in tables)


class FrozenTables(TablesLater):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.requires_grad_(False)


class WrittenTables(FrozenTables):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, table = layer(x)
            with torch.no_grad():
                table.add_(0.5)
        return self.head(x).square().mean()


class Answer:
    """An object in which torch's pytree finds no tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class ObjectLayer(Layer):
    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x))


class Objects(Model):
    layer = ObjectLayer

    def step(self, layer: Any, x: Tensor) -> Tensor:
        return layer(x).value


class FrozenObjects(Objects):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.requires_grad_(False)


class Penalised(Model):
    """A penalty on the weights of the units, in the model's forward."""

    def extra(self) -> Any:
        return sum(0.1 * layer.up.weight.square().sum() for layer in self.layers)


class PenalisedBefore(Penalised):
    def forward(self, x: Tensor) -> Tensor:
        return self.extra() + super().forward(x)


class ParentReads(Model):
    """A parent that computes with its children's weights itself, as `nn.MultiheadAttention` does."""

    def step(self, layer: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(x, layer.up.weight, layer.up.bias))


class FrozenParentReads(ParentReads):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.requires_grad_(False)


class WritingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.up(x))
        y.add_(1.0)  # sigmoid's backward reads what is written here
        return x + y


class WrittenActivation(Model):
    layer = WritingLayer


class DifferentiatingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda y: torch.tanh(self.up(y)).sum())(x)


class Differentiated(Model):
    layer = DifferentiatingLayer


class TwiceDifferentiated(Model):
    """A penalty on the gradient of the input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        loss = super().forward(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class KeptViewLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.view = self.router.weight[:2]
        return super().forward(x)


class KeptViews(Model):
    """A view of a weight that leaves its unit in an attribute."""

    layer = KeptViewLayer

    def step(self, layer: Any, x: Tensor) -> Tensor:
        y = layer(x)
        return y * layer.view.sum(0) + (layer.view.sin() * x[:2]).mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def _trains(kind: str, make: Callable[[], nn.Module], settings: dict[str, Any]) -> dict[str, Tensor] | str:
    """Returns the weights after three steps of SGD, or the error."""
    poisons = settings.get("poisons", "0")  # 0: what is read too late has another unit's values
    settings = {name: value for name, value in settings.items() if name != "poisons"}
    model = build(kind, make(), unit_classes=(Layer,), **settings)
    os.environ[POISONS] = poisons
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.05, clip_grad=0.0), [model])
    rank = model.process_group.rank()
    try:
        for step in range(3):
            model.zero_grad_buffer()
            with model.no_sync():
                model(batch(rank, step)).backward()
            model(batch(rank, step + 5)).backward()
            finalize_model_grads([model])
            optimizer.step()
        return {name: full(tensor) for name, tensor in model.module.state_dict().items()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class AssigningLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = nn.functional.normalize(self.up.weight.data)
        return super().forward(x)


class Assigned(Model):
    """Weights that each forward replaces, as layers with a largest norm do."""

    layer = AssigningLayer


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


class KernelLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Kernel.apply(x, self.up.weight) + self.up.bias)


class Kernels(Model):
    layer = KernelLayer


READ_IN_UNITS = (
    *(Routed, FrozenRouters, TablesAtOnce, TablesLater, FrozenTables, Objects, FrozenObjects, KeptViews),
    Kernels,
)
"""Models that read weights of units in the forwards of the units, or through what these leave behind."""

READ_BY_PARENTS = (Penalised, PenalisedBefore, ParentReads, FrozenParentReads)
RAISE = (WrittenTables, WrittenActivation, Differentiated, TwiceDifferentiated, Assigned)


def _all(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    models = (*READ_IN_UNITS, *READ_BY_PARENTS, *RAISE)
    return {make.__name__: _trains(kind, make, settings) for make in models}


@functools.cache
def outcomes(kind: str, **settings: Any) -> list[dict[str, Any]]:
    return run_distributed(_all, 2, kind, settings)


def assert_same_as_replicas(make: type[Model], **settings: Any) -> None:
    kind = settings.pop("kind")
    expected = outcomes("ddp")[0][make.__name__]
    for found in (outcome[make.__name__] for outcome in outcomes(kind, **settings)):
        assert not isinstance(found, str), found
        assert not {name for name, tensor in found.items() if not torch.equal(tensor, expected[name])}


def name_of(make: type[Model]) -> str:
    return make.__name__


@pytest.mark.parametrize("make", READ_IN_UNITS, ids=name_of)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_weights_read_on_another_path_are_the_units_own(kind, make):
    assert_same_as_replicas(make, kind=kind)


@pytest.mark.parametrize("make", (*READ_IN_UNITS, *READ_BY_PARENTS), ids=name_of)
@pytest.mark.parametrize(
    "settings",
    [{"forward_prefetch": 0, "backward_prefetch": 0}, {"activation_checkpointing": "full"}, {"poisons": "1"}],
    ids=["no prefetch", "recomputed", "poisoned"],
)
@pytest.mark.long
def test_settings_change_no_weight_that_is_read(settings, make):
    assert_same_as_replicas(make, kind="zero3", **settings)


@pytest.mark.parametrize("make", [Routed, FrozenRouters], ids=name_of)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_a_loss_in_an_attribute_of_a_recomputed_unit_is_right(kind, make):
    assert_same_as_replicas(make, kind=kind, activation_checkpointing="full")


class OwnParameter(nn.Parameter):
    """A class of parameters, which may depend on its class: no reader can be made to wait for it."""


def _of_own_class() -> str:
    model = Model()
    model.layers[1].up.weight = OwnParameter(model.layers[1].up.weight.detach())
    with pytest.raises(WrapError) as error:
        build("zero3", model, unit_classes=(Layer,))
    return str(error.value)


def test_own_classes_of_parameters_are_refused():
    for message in run_distributed(_of_own_class, 2):
        assert message.startswith("parameter layers.1.up.weight is a OwnParameter")


@pytest.mark.parametrize("make", READ_BY_PARENTS, ids=name_of)
def test_a_parent_may_read_weights_of_its_units(make):
    assert_same_as_replicas(make, kind="zero3")
    for found in outcomes("fsdp2"):
        assert re.search(
            "was used outside the forward of its unit|mixed torch.Tensor and DTensor", found[make.__name__]
        )


MESSAGES = {
    Assigned: "was written while its unit was gathered|the storage of parameter .* was replaced",
    WrittenTables: "was written while its unit was gathered",
    WrittenActivation: "has been modified by an inplace operation",
    Differentiated: "don't yet support saved tensor hooks",
    TwiceDifferentiated: "has been modified by an inplace operation|a backward with create_graph=True reached unit",
}


@pytest.mark.parametrize("make", RAISE, ids=name_of)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_reads_that_cannot_be_served_raise(kind, make):
    for found in outcomes(kind):
        assert isinstance(found[make.__name__], str) and re.search(MESSAGES[make], found[make.__name__])


def _kept(kind: str) -> list[str]:
    """Returns the warnings of forwards of units that leave views of weights, and then of units that do not."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for make in (KeptViews, Routed):
            build(kind, make(), unit_classes=(Layer,))(batch(0, 0))
    return [str(warning.message) for warning in caught if "reshard_overrides" in str(warning.message)]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_units_whose_weights_are_in_use_keep_memory(kind):
    for found in run_distributed(_kept, 2, kind):
        units = [message.split()[3] for message in found]
        assert units[:3] == ["layers.0", "layers.1", "layers.2"] and len(units) == len(set(units))


def _evaluated_first(kind: str, evaluates: bool) -> dict[str, Tensor]:
    """Trains a step, after an evaluation in which units keep their memory."""
    model = build(kind, KeptViews(), unit_classes=(Layer,))
    if evaluates:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(batch(dist.get_rank(), 1))
    model(batch(dist.get_rank(), 0)).backward()
    finalize_model_grads([model])
    return gradients(model)


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_memory_kept_in_inference_mode_can_be_trained_in(kind):
    (expected, *_), found = (run_distributed(_evaluated_first, 2, kind, evaluates) for evaluates in (False, True))
    for of_rank in found:
        assert all(torch.equal(of_rank[name], value) for name, value in expected.items())


def _hooks_end(kind: str) -> bool:
    """Returns whether hooks of units are gone after a forward that raised, and one that was interrupted."""
    model = build(kind, Model(), unit_classes=(Layer,))
    for error in (ValueError, KeyboardInterrupt):
        with mock.patch.object(Layer, "forward", side_effect=error), pytest.raises(error):
            model(batch(0, 0))
        model.zero_grad_buffer()
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_hooks_end_with_a_forward_that_raises(kind):
    assert all(run_distributed(_hooks_end, 2, kind))


def _inside_hooks(kind: str) -> tuple[int, dict[str, Tensor]]:
    """Returns how many tensors a user's own hooks packed in a routed model's forward, and its gradients."""
    model = build(kind, Routed(), unit_classes=(Layer,))
    os.environ[POISONS] = "0"
    packed = mock.Mock(side_effect=lambda tensor: tensor.detach().clone())
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        loss = model(batch(dist.get_rank(), 0))
    loss.backward()
    finalize_model_grads([model])
    return packed.call_count, gradients(model)


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_hooks_of_the_user_get_all_other_tensors(kind):
    (in_all, expected), (packed, found) = (run_distributed(_inside_hooks, 2, each)[0] for each in ("ddp", kind))
    assert in_all / 2 < packed < in_all  # each layer saves a few weights too
    assert all(torch.equal(found[name], expected[name]) for name in expected)
