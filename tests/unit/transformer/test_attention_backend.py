"""The choice of attention's kernel: on a faked GPU the message and the refusals, on the CPU the kernels that run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.profiler import profile

from core.base.errors import ConfigError, warn_once
from core.transformer import TransformerConfig, attention_backend, dot_product_attention
from core.transformer.attention_backend import pick_backend, warn_of_slow_pieces
from core.transformer.dot_product_attention import DotProductAttention
from core.transformer.enums import AttnBackend
from core.transformer.sequences import PackedDocuments
from tests.unit._on_gpu import ON_GPU

CUDNN, FLASH, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


class FakeGpu:
    """The kernels that a GPU has, as torch reports them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setattr(attention_backend, "_probe", lambda *call, **masked: None)
        self.has(CUDNN, FLASH, EFFICIENT)

    def has(self, *kernels: SDPBackend) -> None:
        def can_use(kernel: SDPBackend) -> Callable[[Any, bool], bool]:
            def answer(probe: Any, debug: bool) -> bool:
                if debug and kernel not in kernels:
                    warnings.warn("it is too wide (Triggered internally at a.cpp:1)", stacklevel=1)
                return kernel in kernels

            return answer

        self._patch.setattr(
            attention_backend, "_CAN_USE", {kernel: can_use(kernel) for kernel in (CUDNN, FLASH, EFFICIENT)}
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    attention_backend._choose.cache_clear()
    yield FakeGpu(monkeypatch)
    attention_backend._choose.cache_clear()


def _choose(backend: str, kind: str = "cuda", channels: int = 128, drops: bool = False) -> str:
    actual: str = pick_backend(
        backend, kind, 0 if kind == "cuda" else None, torch.bfloat16, 8, 2, channels, drops, False
    )
    return actual


def test_a_kernel_is_chosen_and_logged_once(gpu, caplog):
    gpu.has(FLASH, EFFICIENT)
    with caplog.at_level(logging.INFO, "shardstack.transformer.attention_backend"):
        for _ in range(3):
            _choose("auto")
    assert caplog.messages == ["attention: flash or memory-efficient kernel (cuda, bfloat16, heads of 128 channels)"]


def test_device_without_fused_kernel_warns_once(gpu):
    gpu.has()
    with pytest.warns(UserWarning, match="no fused attention kernel here .*channels: it is too wide\\).*quadratic"):
        _choose("auto")


@pytest.mark.parametrize(("backend", "lacking"), [("flash", FLASH), ("fused", CUDNN)])
def test_unavailable_kernel_is_refused(backend, lacking, gpu):
    assert not _choose(backend)
    gpu.has(*{CUDNN, FLASH, EFFICIENT} - {lacking})
    assert _choose(backend, channels=512) == (
        f"attention_backend is '{backend}', which torch does not have here (cuda, bfloat16, heads of 512 channels: "
        "it is too wide); write 'auto'"
    )


@pytest.fixture
def hopper(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU of capability 9.0; returns the implementations that are activated."""
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append, raising=False)
    return activated


def test_flash3_takes_the_place_of_the_flash_kernel(hopper, gpu):
    for _ in range(3):
        assert not _choose("flash3")
    assert hopper == ["FA3"] and attention_backend.KERNELS["flash3"] is FLASH
    assert not _choose("auto", channels=64) and not _choose("flash", channels=64)
    assert hopper == ["FA3"]  # no other value asks for it
    gpu.has(CUDNN)
    assert "it is too wide" in _choose("flash3", channels=512)


def test_what_flash3_lacks_is_named(hopper, monkeypatch):
    def no_package(name: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'\nmore")

    def refusal(**call: Any) -> str:
        attention_backend._choose.cache_clear()
        message = _choose("flash3", **call)
        assert message.startswith("attention_backend is 'flash3', which torch does not have here (")
        assert message.endswith("); write 'auto'") and "\n" not in message
        return message

    assert "dropout: it drops no attention weights" in refusal(drops=True) and not hopper
    assert "(cpu, bfloat16, heads of 128 channels: it needs a GPU of capability 9.0)" in refusal(kind="cpu")
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", no_package)
    assert "package flash_attn_interface, and torch says: No module named" in refusal()
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert "it needs torch 2.11 or newer" in refusal()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "it needs a GPU of capability 9.0" in refusal()


def _attention(backend: Any, **fields: Any) -> DotProductAttention:
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    fields = {"attention_dropout": 0.0} | fields
    return DotProductAttention(TransformerConfig(**sizes, attention_backend=backend, **fields))


def _inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    length = 9 if device == "cpu" else 128
    sizes = ((length, 2, 4, 16), (length, 2, 2, 16), (length, 2, 2, 16))
    return tuple(torch.randn(size, generator=draw).to(device, dtype).requires_grad_() for size in sizes)


@pytest.mark.parametrize(
    ("backend", "is_fused", "compiles"),
    [
        *(("auto", True, False), ("flash", True, False), ("unfused", False, False), ("local", False, False)),
        *(("flash", True, True), ("local", False, True)),
    ],
)
def test_requested_kernel_runs_on_cpu(backend, is_fused, compiles):
    attention, inputs = _attention(backend), _inputs()
    expected = _attention("auto")(*inputs)
    if compiles:
        torch._dynamo.reset()
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    attention(*inputs)
    with profile() as profiler:
        actual = attention(*inputs)
    ran = {event.name for event in profiler.events()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) is is_fused
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual, expected) or not is_fused


@pytest.mark.parametrize(
    ("backend", "dropout", "compiles"), [("fused", 0.0, False), ("flash", 0.1, True), ("flash3", 0.0, True)]
)
def test_cpu_refuses_missing_kernels(backend, dropout, compiles):
    attention = _attention(backend, attention_dropout=dropout)
    if compiles:
        torch._dynamo.reset()
        attention = torch.compile(attention, backend="aot_eager")
    with pytest.raises(ConfigError, match=rf"^attention_backend is '{backend}', .* \(cpu, .*\); write 'auto'$"):
        attention(*_inputs())


def test_packed_documents_need_flash():
    documents = PackedDocuments(torch.zeros(2, 9, dtype=torch.long), 0, 1)
    _attention("flash")(*_inputs(), documents=documents)
    with pytest.raises(ConfigError, match=r"'unfused', which takes neither packed documents .*'auto' or 'flash'"):
        _attention("unfused")(*_inputs(), documents=documents)
    with pytest.raises(ConfigError, match=r"'flash3', which torch does not have here .*capability 9\.0"):
        _attention("flash3")(*_inputs(), documents=documents)
    with pytest.raises(ConfigError, match=r"'fused' with context_parallel_size 2, .*'auto' or 'flash'"):
        _attention("fused", context_parallel_size=2)


@pytest.mark.parametrize(
    ("packed", "ranks", "dtype", "channels", "message"),
    [
        (True, 1, torch.float32, 128, "packed documents in float32 take one call .* each document.*use bf16"),
        (True, 4, torch.bfloat16, 128, "packed documents over 4 context-parallel ranks .*context_parallel_size to 1"),
        (True, 1, torch.bfloat16, 320, "heads of 320 channels in bfloat16 have no fused .*up to 256 channels"),
        (False, 2, torch.float64, 64, "heads of 64 channels in float64 have no fused .*use bf16"),
    ],
)
def test_slow_attention_path_warns_once(packed, ranks, dtype, channels, message):
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=message):
        warn_of_slow_pieces("cuda", packed, ranks, dtype, channels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_pieces("cuda", packed, ranks, dtype, channels)


def test_fast_attention_paths_do_not_warn():
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_pieces("cuda", False, 4, torch.bfloat16, 128)
        warn_of_slow_pieces("cpu", True, 4, torch.float64, 512)


def test_attention_checks_for_slow_path(monkeypatch):
    requests: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dot_product_attention, "warn_of_slow_pieces", lambda *call: requests.append(call))
    _attention("auto")(*_inputs(), documents=PackedDocuments(torch.zeros(2, 9, dtype=torch.long), 0, 1))
    _attention("auto")(*_inputs())
    assert requests == [("cpu", True, 1, torch.float32, 16)]


def test_a_member_of_megatrons_enum_becomes_its_name():
    class Foreign(Enum):
        unfused = 3

    for given in (Foreign.unfused, AttnBackend.unfused, "unfused"):
        assert _attention(given).config.attention_backend == "unfused"
    assert TransformerConfig().attention_backend == AttnBackend.auto.name
    with pytest.raises(ConfigError, match="attention_backend is 'triton'; it takes one of auto, flash"):
        _attention("triton")


@pytest.mark.parametrize("backend", [pytest.param(name, marks=ON_GPU) for name in ("auto", "flash", "fused")])
def test_every_kernel_of_a_gpu_computes_attention(backend):
    inputs, others = (_inputs("cuda", torch.bfloat16) for _ in range(2))
    actual, expected = _attention(backend)(*inputs), _attention("unfused")(*others)
    for output in (actual, expected):
        output.float().square().sum().backward()
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-1, rtol=1e-1)
