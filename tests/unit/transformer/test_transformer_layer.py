"""One layer: its residual paths, and that torch.compile takes it."""

import pytest
import torch

from core.transformer import TransformerLayer
from tests.unit.models._cases import CASES, LENGTH, build, relative_error


def _layer_and_input(name="swiglu-gqa-rope-rms"):
    model = build(CASES[name])
    hidden_states = torch.randn(LENGTH, 2, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rotation = model.rotary_pos_emb(LENGTH, device=torch.device("cpu"))
    return model.decoder.layers[0], hidden_states, rotation


def test_layer_with_zero_branches_is_identity():
    layer, hidden_states, rotation = _layer_and_input()
    assert isinstance(layer, TransformerLayer)
    with torch.no_grad():
        for projection in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            projection.weight.zero_()
    assert torch.equal(layer(hidden_states, None, rotary_pos_emb=rotation), hidden_states)


@pytest.mark.long
@pytest.mark.parametrize("name", ["swiglu-gqa-rope-rms", "qk-norm-partial-rope-tied"])
def test_compiled_equals_eager(name):
    layer, hidden_states, rotation = _layer_and_input(name)
    eager = layer(hidden_states, None, rotary_pos_emb=rotation)
    (expected,) = torch.autograd.grad(eager.square().sum(), hidden_states)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)(hidden_states, None, rotary_pos_emb=rotation)
    (actual,) = torch.autograd.grad(compiled.square().sum(), hidden_states)
    assert relative_error(compiled, eager) < 1e-6 and relative_error(actual, expected) < 1e-5
