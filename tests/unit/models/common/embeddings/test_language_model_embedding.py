"""Embeddings: layout, positions and dropout (cut over ranks they are tested within the whole model)."""

import torch

from core.models.common.embeddings import LanguageModelEmbedding
from core.transformer import TransformerConfig


def embedding(kind, dropout=0.0):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, hidden_dropout=dropout)
    return LanguageModelEmbedding(config, 32, 6, kind)


def test_embedding_output_is_sequence_first():
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    words = embedding("rope")
    assert torch.equal(words(ids), words.word_embeddings.weight[ids].transpose(0, 1))
    assert words.position_embeddings is None
    both = embedding("learned_absolute")
    table = both.position_embeddings.weight
    assert table.shape == (6, 8)
    expected = both.word_embeddings.weight[ids] + table[:3]
    torch.testing.assert_close(both(ids), expected.transpose(0, 1))
    positions = torch.tensor([[5, 4, 3], [0, 0, 1]])
    expected = both.word_embeddings.weight[ids] + table[positions]
    torch.testing.assert_close(both(ids, positions), expected.transpose(0, 1))


def test_dropout_in_training_only():
    words, ids = embedding("rope", dropout=0.5), torch.arange(6).view(1, 6)
    assert (words(ids) == 0).any()
    assert not (words.eval()(ids) == 0).any()
