"""Frozen weights of packed codes under every wrapper: the same bytes, and adapters that train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.base.errors import CheckpointError, ParallelConfigError, WrapError
from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import load, load_model_state_dict, model_state_dict, save
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.module import Float16Module
from core.transformer.transformer_config import TransformerConfig
from core.weights import WeightStream
from tests.unit._quick import needs, quick
from tests.unit._spawn import on_ranks
from tests.unit._whole import whole_weights
from tests.unit.distributed._toys import Codes, build

WIDTH, INNER = 8, 13
KINDS = ["ddp", "zero1", "zero2_overlap", "zero3", "fsdp2"]


class CodedLinear(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (INNER * WIDTH, 1), dtype=torch.uint8)  # each bit pattern, NaN among floats
        self.weight = Codes(codes.view(-1, storage.itemsize).view(storage), SimpleNamespace(scale=torch.rand(INNER)))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.detach().view(-1).view(torch.uint8).view(INNER, WIDTH)
        return x @ ((codes.float() - 128) / 64 * self.weight.quant_state.scale[:, None]).to(x.dtype).t()


class Adapted(nn.Module):
    """A packed linear with an adapter, and a trained one."""

    def __init__(self, linear: nn.Module, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.base = linear
        self.a, self.b = nn.Parameter(torch.randn(2, width) / 4), nn.Parameter(torch.randn(inner, 2) / 4)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t()))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def _coded(storage: torch.dtype, seed: int = 0) -> Stack:
    """Returns a stack whose scales are always those of the first seed: they are in no state dict."""
    made, first = (Stack(lambda: Adapted(CodedLinear(storage)), s) for s in (seed, 0))
    for layer, other in zip(made.layers, first.layers, strict=True):
        layer.base.weight.quant_state = other.base.weight.quant_state
    return made


def _train(model: Any, width: int = WIDTH) -> list[Tensor]:
    """Takes three steps on one batch for all ranks, whose mean is exact."""
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.0), [model])
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step + 10)
        losses.append(model(torch.randn(4, width)))
        losses[-1].backward()
        if hasattr(model, "zero_grad_buffer"):
            finalize_model_grads([model])
        optimizer.step()
    return [loss.detach() for loss in losses]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(_bytes(actual[name]), _bytes(tensor))] == []


@pytest.mark.parametrize(
    ("kind", "storage"),
    quick(
        product(KINDS, (torch.uint8, torch.bfloat16, torch.float32)),
        lambda case: case[1] is torch.uint8 or case in (("zero3", torch.bfloat16), ("fsdp2", torch.float32)),
    ),
)
@on_ranks(2)
def test_codes_keep_their_bytes_and_adapters_train(kind: str, storage: torch.dtype, tmp_path: Path) -> None:
    alone = _coded(storage)
    codes = {name: tensor for name, tensor in whole_weights(alone).items() if "base" in name}
    losses, expected = _train(alone), whole_weights(alone)
    _assert_equal({name: expected[name] for name in codes}, codes)
    model, other = (build(kind, _coded(storage, seed), unit_classes=(Adapted,)) for seed in (0, 1))
    assert _train(model) == losses
    save(model_state_dict(unwrap_model(model)), tmp_path)
    load(model_state_dict(unwrap_model(other)), tmp_path)
    for trained in (model, other):
        _assert_equal(whole_weights(trained), expected)


@pytest.mark.parametrize(
    ("kind", "storage"), [("zero3", torch.uint8), ("fsdp2", torch.uint8), ("zero3", torch.bfloat16)]
)
@on_ranks(2)
def test_codes_are_not_cast_with_the_model(kind: str, storage: torch.dtype) -> None:
    expected = whole_weights(_coded(storage))
    model = build(kind, _coded(storage), unit_classes=(Adapted,), param_dtype="bf16")
    _train(model)
    _assert_equal(*({n: t for n, t in of.items() if "base" in n} for of in (whole_weights(model), expected)))


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@on_ranks(1)
def test_what_would_change_codes_is_refused(kind: str) -> None:
    with pytest.raises(
        ParallelConfigError, match=r"layers.0.base.weight holds packed codes in float32.*quant_storage"
    ):
        build(kind, _coded(torch.float32), unit_classes=(Adapted,), param_dtype="bf16")
    trained = _coded(torch.float32)
    trained.layers[1].base.weight.requires_grad_(True)
    with pytest.raises(WrapError, match=r"layers.1.base.weight holds packed codes.*freeze it"):
        build(kind, trained, unit_classes=(Adapted,))


def _quantised(storage: torch.dtype) -> Stack:
    import bitsandbytes

    def make() -> Adapted:
        options = {"quant_type": "nf4", "quant_storage": storage}
        linear = bitsandbytes.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float32, **options)
        linear.weight = bitsandbytes.nn.Params4bit(torch.randn(96, 64), requires_grad=False, **options)
        return Adapted(linear.to("cpu"), 64, 96)  # the move quantises

    return Stack(make)


@needs("bitsandbytes")
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_weights_of_bitsandbytes_train_adapters(kind: str, storage: torch.dtype) -> None:
    wrapped = build(kind, _quantised(storage), unit_classes=(Adapted,))
    assert _train(wrapped, 64) == _train(_quantised(storage), 64)


class EightBits(nn.Parameter):
    """Codes with the scales of their rows: the shape of bitsandbytes' ``Int8Params``, which has `CB` too."""

    SCB: Tensor | None
    CB: Tensor | None

    def __new__(cls, data: Tensor, scales: Tensor) -> EightBits:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.SCB = scales
        return made


class EightBitLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = EightBits(torch.randint(-128, 128, (INNER, WIDTH), dtype=torch.int8), torch.rand(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.detach().to(x.dtype) / 64 * self.weight.SCB[:, None]).t()


def _eight_bits() -> Stack:
    return Stack(lambda: Adapted(EightBitLinear()))


@on_ranks(2)
def test_codes_in_eight_bits_have_their_scales() -> None:
    alone = _eight_bits()
    losses, expected = _train(alone), whole_weights(alone)
    for kind in KINDS:
        model = build(kind, _eight_bits(), unit_classes=(Adapted,))
        assert _train(model) == losses, kind
        _assert_equal(whole_weights(model), expected)


@on_ranks(2)
def test_codes_in_an_attribute_are_refused_if_cut() -> None:
    for kind in KINDS:
        model = _eight_bits()
        for layer in model.layers:
            layer.base.weight.CB = layer.base.weight.data
        if kind in ("zero3", "fsdp2"):
            with pytest.raises(WrapError, match=r"layers.*base.weight is a EightBits.*attribute CB.*4 bits"):
                build(kind, model, unit_classes=(Adapted,))
        else:
            _train(build(kind, model, unit_classes=(Adapted,)))


@pytest.mark.parametrize("kind", ["zero1", "zero3", "fsdp2"])
@on_ranks(2)
def test_streams_and_loads_round_no_codes(kind: str, tmp_path: Path) -> None:
    expected = whole_weights(_coded(torch.float32))
    model = build(kind, _coded(torch.float32), unit_classes=(Adapted,))
    for name, tensor in WeightStream(model, "module", dtype=torch.bfloat16):
        is_packed = "base" in name
        assert tensor.dtype == (torch.float32 if is_packed else torch.bfloat16)
        if is_packed:
            _assert_equal({name: tensor}, {name: expected[name]})
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    save(rounded, tmp_path)
    for load_rounded in (
        lambda: load(model_state_dict(unwrap_model(model)), tmp_path, cast=True),
        lambda: load_model_state_dict(unwrap_model(model), rounded),
    ):
        with pytest.raises(CheckpointError, match=r"layers.0.base.weight is .*bfloat16.*float32"):
            load_rounded()
    _assert_equal(whole_weights(model), expected)


def test_the_half_precision_module_rounds_no_codes() -> None:
    module = _coded(torch.float32)
    before = _bytes(module.layers[0].base.weight.data).clone()
    Float16Module(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True), module)
    assert module.layers[0].a.dtype == torch.bfloat16
    assert torch.equal(_bytes(module.layers[0].base.weight.data), before)
