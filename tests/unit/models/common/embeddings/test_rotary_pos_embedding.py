"""Rotary angles and the rotation, as complex numbers say they should be."""

import pytest
import torch

from core.base.errors import ConfigError
from core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb

CPU = torch.device("cpu")


@pytest.mark.parametrize(("channels", "percent", "turned"), [(8, 1.0, 8), (8, 0.5, 4), (16, 0.25, 4)])
def test_rotation_equals_complex_multiplication(channels, percent, turned):
    x = torch.randn(6, 2, 3, channels, generator=torch.Generator().manual_seed(0))
    rotation = RotaryEmbedding(channels, rotary_percent=percent, rotary_base=100.0)(6, device=CPU)
    assert [part.shape for part in rotation] == [(6, 1, 1, turned)] * 2
    half = turned // 2
    angles = torch.outer(torch.arange(6.0), 100.0 ** -(torch.arange(half) / half))[:, None, None]
    expected = torch.complex(x[..., :half], x[..., half:turned]) * torch.polar(torch.ones_like(angles), angles)
    actual = apply_rotary_pos_emb(x, rotation)
    torch.testing.assert_close(actual[..., :turned], torch.cat((expected.real, expected.imag), -1))
    assert torch.equal(actual[..., turned:], x[..., turned:])
    # more dims between batch and channels turn in the same way
    torch.testing.assert_close(apply_rotary_pos_emb(x.unflatten(2, (1, 3)), rotation).flatten(2, 3), actual)


def test_explicit_positions_per_row():
    embedding = RotaryEmbedding(8)
    positions = torch.tensor([[0, 1, 2], [5, 0, 1]])
    cos, sin = embedding(3, device=CPU, position_ids=positions)
    all_cos, all_sin = embedding(6, device=CPU)
    assert cos.shape == sin.shape == (3, 2, 1, 8)
    for row in range(2):
        torch.testing.assert_close(cos[:, row], all_cos[positions[row], 0])
        torch.testing.assert_close(sin[:, row], all_sin[positions[row], 0])


def test_only_last_length_is_cached():
    embedding = RotaryEmbedding(8)
    first = embedding(4, device=CPU)
    assert embedding(4, device=CPU) is first
    assert embedding(5, device=CPU)[0].shape[0] == 5 and embedding(4, device=CPU) is not first


def test_tables_cached_in_inference_mode_serve_training():
    embedding, x = RotaryEmbedding(8), torch.randn(4, 1, 1, 8, requires_grad=True)
    with torch.inference_mode():
        embedding(4, device=CPU)
    apply_rotary_pos_emb(x, embedding(4, device=CPU)).sum().backward()
    assert x.grad is not None


def test_angles_survive_casts_and_meta_start():
    expected = RotaryEmbedding(8)(64, device=CPU)
    with torch.device("meta"):
        embedding = RotaryEmbedding(8)
    actual = embedding.bfloat16().to_empty(device="cpu")(64, device=CPU)
    assert not list(embedding.buffers()) and all(map(torch.equal, actual, expected))
    assert apply_rotary_pos_emb(torch.randn(64, 1, 1, 8, dtype=torch.bfloat16), actual).dtype == torch.bfloat16


def test_channel_pairs_rotate_together():
    with pytest.raises(ConfigError, match=r"kv_channels 6 x rotary_percent 0\.5 is 3 rotated channels"):
        RotaryEmbedding(6, rotary_percent=0.5)
