"""Dtypes under FSDP2: what is cast, what keeps its own, and what a gradient accumulates in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.base.errors import WrapError
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import batches, build, gradients, loss_of, synced_last, toy


class MixedLayer(nn.Module):
    """A bf16 layer with an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x.float()).bfloat16())


class Mixed(nn.Module):
    """A bf16 model with fp32 norms, as checkpoints in low precision hold them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([MixedLayer() for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.float()).bfloat16()).float()


class Scaled(nn.Module):
    """fp32 weights in modules whose children are bf16, and in the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gain = nn.Parameter(torch.full((6,), 1.5))
        self.layers = nn.ModuleList([_scaled_layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.linear = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x.bfloat16()).float() * self.scale


def _scaled_layer() -> ScaledLayer:
    return ScaledLayer()


@on_ranks(2)
def test_a_module_with_children_of_another_dtype_keeps_its_own() -> None:
    for unit_classes in ([ScaledLayer], []):
        model = build("fsdp2", Scaled(), unit_classes=unit_classes)
        expected, x = Scaled(), torch.linspace(0, 1, 12).view(2, 6)
        model(x).sum().backward()
        model.finish_grad_sync()
        expected(x).sum().backward()
        for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted.grad), name


class Branching(nn.Module):
    """bf16, with a branch that is not always taken, and a unit that is never reached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.layer.forward = self._layer
        self.spare = nn.Linear(6, 6)
        self.takes_branch = False

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer["b"](self.layer["a"](x)) if self.takes_branch else self.layer["a"](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x)


@pytest.mark.parametrize("branches", [[False, False], [False, True], [True, False]])
@on_ranks(2)
def test_gradients_accumulated_in_fp32_may_come_late_or_never(branches: list[bool]) -> None:
    module = Branching()
    model = build(
        "fsdp2", module, config=SimpleNamespace(bf16=True), unit_classes=[nn.Linear], grad_reduce_in_fp32=True
    )
    x = torch.linspace(0, 1, 12).view(2, 6)
    for branch in synced_last(model, branches):
        module.takes_branch = branch
        model(x).sum().backward()
    finalize_model_grads([model])
    found = gradients(model)
    assert found["layer.a.weight"].abs().sum() > 0 and not found["spare.weight"].any()
    assert found["layer.b.weight"].any() == any(branches)


@on_ranks(2)
def test_fp32_norms_in_a_bf16_model_keep_their_dtype() -> None:
    model = build("fsdp2", Mixed(), config=SimpleNamespace(bf16=True), unit_classes=[MixedLayer])
    assert [unit.names for unit in model.engine.units[:-1]] == [
        ("layers.0.norm",),
        ("layers.0",),
        ("layers.1.norm",),
        ("layers.1",),
        ("norm",),
    ]
    expected = Mixed()
    x = torch.linspace(0, 1, 12).view(2, 6)
    model(x).sum().backward()
    model.finish_grad_sync()
    expected(x).sum().backward()
    for (name, found), wanted in zip(gradients(model).items(), expected.parameters(), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted.grad), name


@on_ranks(1)
def test_a_module_of_two_dtypes_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(WrapError, match=r"module '0' holds trainable parameters of 2 dtypes, .*bfloat16.*float32"):
        build("fsdp2", module)
    module[0].bias.requires_grad_(False)
    model = build("fsdp2", module)
    assert model.engine.units[:-1]


@on_ranks(2)
def test_fp16_with_a_loss_scale_skips_an_overflow_on_all_ranks() -> None:
    model = build("fsdp2", toy(), config=SimpleNamespace(fp16=True))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=2.0**8, hysteresis=1), [model]
    )
    before = {name: parameter.to_local().clone() for name, parameter in model.module.named_parameters()}
    scale = optimizer.get_loss_scale().item()
    optimizer.scale_loss(loss_of(model, batches(0)[0])).backward()
    finalize_model_grads([model])
    if dist.get_rank() == 1:
        next(p for p in model.parameters() if p.grad is not None and p.grad.to_local().numel()).grad.to_local().fill_(
            float("inf")
        )
    assert optimizer.step()[0] is False
    assert optimizer.get_loss_scale().item() == scale / 2
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name
    model.zero_grad_buffer()
    optimizer.scale_loss(loss_of(model, batches(0)[0])).backward()
    finalize_model_grads([model])
    assert optimizer.step()[0] is True
