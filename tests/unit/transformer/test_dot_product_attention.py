"""The core of attention against softmax written out, for every layout that it is given."""

import math

import pytest
import torch

from core.transformer import TransformerConfig
from core.transformer import dot_product_attention as module
from core.transformer.dot_product_attention import DotProductAttention

S, B, HEADS, D = 9, 2, 4, 8


def core(dropout=0.0):
    return DotProductAttention(
        TransformerConfig(num_layers=1, hidden_size=HEADS * D, num_attention_heads=HEADS, attention_dropout=dropout)
    )


def inputs(groups):
    generator = torch.Generator().manual_seed(groups)
    # Views into one fused tensor, as the layer makes them: their strides are not those of a tensor of their own.
    mixed = torch.randn(S, B, HEADS + 2 * groups, D, generator=generator)
    return mixed.split([HEADS, groups, groups], dim=2)


def written_out(query, key, value, hidden=None):
    unseen = torch.ones(S, S, dtype=torch.bool).triu(1)
    unseen = unseen if hidden is None else unseen | hidden
    per_group = query.shape[2] // key.shape[2]
    heads = []
    for head in range(query.shape[2]):
        q, k, v = (
            query[:, :, head].double(),
            key[:, :, head // per_group].double(),
            value[:, :, head // per_group].double(),
        )
        scores = torch.einsum("ibd,jbd->bij", q, k) / math.sqrt(D)
        weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
        heads.append(torch.einsum("bij,jbd->ibd", weights, v))
    return torch.cat(heads, dim=-1).float()


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fuses_groups", [True, False])
def test_output_equals_the_formula(monkeypatch, groups, masked, fuses_groups):
    monkeypatch.setattr(module, "_fuses_groups", lambda query, mask: fuses_groups)
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.3 if masked else None
    if mask is not None:
        mask &= ~torch.eye(S, dtype=torch.bool)
    query, key, value = inputs(groups)
    expected = written_out(query, key, value, None if mask is None else mask[:, 0])
    torch.testing.assert_close(core()(query, key, value, mask), expected)


def test_dropout_drops_in_training_only_and_follows_the_seed():
    attention, tensors = core(dropout=0.5), inputs(2)

    def run(seed):
        torch.manual_seed(seed)
        return attention(*tensors)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    attention.eval()
    torch.testing.assert_close(run(1), written_out(*tensors))
