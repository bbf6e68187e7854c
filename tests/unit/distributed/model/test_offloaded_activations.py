"""Activations in host memory: the bits of training without, for every wrapper, and what is copied, once each."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from core.base.errors import MemoryLimitError, ParallelConfigError
from core.distributed.model import offloaded_activations
from core.distributed.model.offloaded_activations import offload_activations
from core.distributed.plan.parts import UnitTransform
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Block, build, reduced, toy


class Copies:
    """Counts the tensors that are copied to the host, and those that came back."""

    def __init__(self) -> None:
        self.to_host: list[tuple[int, ...]] = []
        self.back: list[tuple[int, ...]] = []
        self.alive = 0
        """Copies on the host now."""
        counted = self

        class Counted(offloaded_activations._OnHost):
            def __init__(self, forward: Any, tensor: Tensor, order: Any) -> None:
                super().__init__(forward, tensor, order)
                counted.to_host.append(tuple(tensor.shape))
                counted.alive += 1

            def _copy_back(self) -> Any:
                counted.back.append(tuple(self._host.shape))
                return super()._copy_back()

            def __del__(self) -> None:
                counted.alive -= 1

        self.type = Counted


@pytest.fixture
def copies():
    counted = Copies()
    with (
        mock.patch.object(offloaded_activations, "_OnHost", counted.type),
        mock.patch.object(offloaded_activations, "LEAST_BYTES", 64),
    ):
        yield counted


def _offloaded(*modules: nn.Module) -> None:
    offload_activations(
        UnitTransform(modules=(module,), recomputes="none", is_compiled=False, offloads=True) for module in modules
    )


class Layer(nn.Module):
    """Saves its input twice, its hidden values twice, and a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 5))
        self.other = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.t().t() + x @ self.other.t()) * x.sum()


def test_a_copied_model_computes_without_offloading(copies):
    layer, x = Layer(), torch.ones(4, 6)
    _offloaded(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(x).sum().backward()
    assert not copies.to_host


def test_each_activation_is_copied_once_and_no_weight(copies):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 6, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), [x, layer.up, layer.other])
    _offloaded(layer)
    loss = layer(x).sum()
    assert sorted(copies.to_host) == [(20,), (24,)]
    found = torch.autograd.grad(loss, [x, layer.up, layer.other])
    assert all(map(torch.equal, found, expected))
    assert sorted(copies.back) == [(20,), (24,)]


def test_a_unit_comes_back_while_backward_is_in_the_next(copies):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    _offloaded(*layers)
    seen: list[int] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *unused: seen.append(len(copies.back)))
    layers(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert len(copies.to_host) == len(copies.back) == 6
    assert seen == [4, 6, 6]  # at the end of each unit's backward the unit before it is back


def test_a_tensor_written_later_keeps_its_saved_value(copies):
    weight = nn.Parameter(torch.ones(30))

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * weight
            with torch.no_grad():
                x.mul_(2.0)
            return y + x * weight

    module = Scale()
    _offloaded(module)
    module(torch.full((30,), 5.0)).sum().backward()
    assert torch.equal(weight.grad, torch.full((30,), 15.0))  # two versions, two copies
    assert len(copies.to_host) == 2


def test_a_kept_graph_is_read_again(copies):
    layer, x = Layer(), torch.randn(4, 6, requires_grad=True)
    _offloaded(layer)
    loss = layer(x).sum()
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, [x])[0], first[0])
    assert len(copies.back) == 4  # twice each


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.tanh().exp()
        raise ValueError("here")


def test_nothing_is_left_after_an_exception(copies):
    layer, failing = Layer(), Fails()
    _offloaded(layer, failing)
    for _ in range(2):
        with pytest.raises(ValueError, match="here"):
            failing(layer(torch.randn(4, 6, requires_grad=True)).t())
        gc.collect()
        assert copies.alive == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    copies.to_host.clear()
    torch.randn(4, 6, requires_grad=True).tanh()
    assert not copies.to_host
    with torch.no_grad():
        layer(torch.randn(4, 6))
    assert not copies.to_host


def test_a_full_host_is_named_in_one_line(copies):
    layer = Layer()
    _offloaded(layer)
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 96 bytes.")
    with mock.patch.object(torch, "empty_like", side_effect=full), pytest.raises(MemoryLimitError) as caught:
        layer(torch.randn(4, 6, requires_grad=True))
    message = str(caught.value)
    assert message.startswith("offload_activations needs 96 B more of the host's memory") and "\n" not in message
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_expanded_and_small_tensors_stay():
    copies = Copies()
    layer = Layer()
    with mock.patch.object(offloaded_activations, "_OnHost", copies.type):
        _offloaded(layer)
        layer(torch.randn(4, 6, requires_grad=True)).sum().backward()
        assert not copies.to_host
        with mock.patch.object(offloaded_activations, "LEAST_BYTES", 64):
            layer(torch.randn(1, 6).expand(4, 6)).sum().backward()
        assert copies.to_host == [(20,)]


def _gradients(kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    return reduced(build(kind, toy(), unit_classes=(Block, nn.Embedding), **options), 2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in ("ddp", "zero1_overlap", "zero2_overlap", "zero3", "fsdp2")]
    + [(kind, {"activation_checkpointing": "full"}) for kind in ("zero2_overlap", "zero3", "fsdp2")],
)
@on_ranks(2)
def test_every_wrapper_has_the_same_bits(kind: str, options: dict[str, Any]) -> None:
    expected, copies = _gradients(kind, options), Copies()
    with (
        mock.patch.object(offloaded_activations, "_OnHost", copies.type),
        mock.patch.object(offloaded_activations, "LEAST_BYTES", 64),
    ):
        found = _gradients(kind, options | {"offload_activations": True})
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    # The first of two blocks, four forwards: the input of recomputation alone, or what the block saves.
    assert len(copies.to_host) == (4 if "activation_checkpointing" in options else 12), copies.to_host
    assert sorted(copies.back) == sorted(copies.to_host)
    assert copies.alive == 0


@on_ranks(1)
def test_a_model_of_single_layers_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match="offload_activations True, but no unit"):
        build("ddp", nn.Sequential(nn.Linear(3, 3)), unit_classes=(nn.Linear,), offload_activations=True)
