"""Norms: their marks, and that only NVIDIA's apex counts as apex."""

import sys
import types

import pytest
import torch

from core.base.errors import ConfigError
from core.transformer import TransformerConfig
from core.transformer.norms import LayerNorm, RMSNorm, build_norm

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


def test_the_config_names_the_norm():
    assert isinstance(build_norm(TransformerConfig(**SIZES), 8), LayerNorm)
    rms = build_norm(TransformerConfig(normalization="RMSNorm", **SIZES), 8)
    assert isinstance(rms, RMSNorm) and [name for name, _ in rms.named_parameters()] == ["weight"]


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_values_and_gradients_equal_formula(kind):
    norm = kind(TransformerConfig(layernorm_epsilon=0.5, **SIZES), 8).double()
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.linspace(0.5, 2.0, 8) + number)

    def normalise(x, weight, bias=0.0):
        centred = x - x.mean(-1, keepdim=True) if kind is LayerNorm else x
        return centred / (centred.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight + bias

    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *norm.parameters()]
    torch.testing.assert_close(norm(x), normalise(*inputs))
    weigh = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)
    expected = torch.autograd.grad((normalise(*inputs) * weigh).sum(), inputs)
    for actual, value in zip(torch.autograd.grad((norm(x) * weigh).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(actual, value)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_partial_gradients_are_marked(kind):
    config = TransformerConfig(tensor_model_parallel_size=2, sequence_parallel=True, **SIZES)
    assert all(parameter.sequence_parallel for parameter in kind(config, 8).parameters())
    assert not any(parameter.sequence_parallel for parameter in kind(config, 8, partial_gradients=False).parameters())
    assert not any(parameter.sequence_parallel for parameter in kind(TransformerConfig(**SIZES), 8).parameters())


def _install(monkeypatch, name, **attributes):
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_the_apex_of_pypi_is_refused(monkeypatch):
    _install(monkeypatch, "apex")
    assert build_norm(TransformerConfig(**SIZES), 8)._apex is None
    monkeypatch.setenv("SHARDSTACK_APEX", "1")
    with pytest.raises(ConfigError, match="SHARDSTACK_APEX is 1, but No module named 'fused_layer_norm_cuda'"):
        build_norm(TransformerConfig(**SIZES), 8)
    for name in ("fused_layer_norm_cuda", "apex.normalization", "apex.normalization.fused_layer_norm"):
        _install(monkeypatch, name)
    with pytest.raises(ConfigError, match=r"fused_layer_norm has no fused_layer_norm_affine"):
        build_norm(TransformerConfig(**SIZES), 8)
    monkeypatch.setenv("SHARDSTACK_APEX", "yes")
    with pytest.raises(ConfigError, match="SHARDSTACK_APEX is 'yes'; it takes 1 or 0"):
        build_norm(TransformerConfig(**SIZES), 8)


def test_apex_kernels_run_on_gpu_tensors_only(monkeypatch):
    calls = []

    def layer_norm(input_, weight, bias, shape, eps):
        calls.append(("layer", shape, eps))
        return input_

    def rms_norm(input_, weight, shape, eps):
        calls.append(("rms", shape, eps))
        return input_

    for name in ("fused_layer_norm_cuda", "apex", "apex.normalization"):
        _install(monkeypatch, name)
    _install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=layer_norm,
        fused_rms_norm_affine=rms_norm,
    )
    monkeypatch.setenv("SHARDSTACK_APEX", "1")
    config = TransformerConfig(**SIZES)
    for kind in (LayerNorm, RMSNorm):
        kind(config, 8)(torch.randn(2, 8))
    assert calls == []

    class _OnGPU(torch.Tensor):
        is_cuda = True

    for kind in (LayerNorm, RMSNorm):
        kind(config, 8)(torch.randn(2, 8).as_subclass(_OnGPU))
    assert calls == [("layer", (8,), 1e-5), ("rms", (8,), 1e-5)]
