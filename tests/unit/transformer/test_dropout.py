"""Dropout: when it is applied, and which random stream it draws from."""

import pytest
import torch

from core import parallel_state
from core.models.common.embeddings import LanguageModelEmbedding
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from core.transformer import TransformerConfig
from core.transformer.dot_product_attention import DotProductAttention
from core.transformer.transformer_layer import hidden_dropout
from tests.unit._spawn import run_distributed

ONES = torch.ones(64)


def test_dropout_in_training_with_positive_probability():
    assert hidden_dropout(ONES, 0.0, training=True, sequence_parallel=False) is ONES
    assert hidden_dropout(ONES, 0.5, training=False, sequence_parallel=False) is ONES
    dropped = hidden_dropout(ONES, 0.5, training=True, sequence_parallel=False)
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_embeddings_are_dropped_in_training_only():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, hidden_dropout=0.5)
    words, ids = LanguageModelEmbedding(config, 32, 6, "rope"), torch.arange(6).view(1, 6)
    assert (words(ids) == 0).any()
    assert not (words.eval()(ids) == 0).any()


def _drawn(sequence_parallel, tp, cp):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model_parallel_manual_seed(5)
    try:
        return hidden_dropout(ONES, 0.5, training=True, sequence_parallel=sequence_parallel)
    finally:
        get_rng_tracker().reset()


@pytest.mark.parametrize(("sequence_parallel", "tp", "cp"), [(False, 2, 1), (True, 2, 1), (False, 1, 2)])
def test_ranks_share_a_mask_unless_they_hold_sequence_parts(sequence_parallel, tp, cp):
    first, second = run_distributed(_drawn, 2, sequence_parallel, tp, cp)
    assert torch.equal(first, second) == (tp == 2 and not sequence_parallel)


@pytest.mark.long
def test_masks_under_tp_and_cp():
    whole = run_distributed(_drawn, 4, False, 2, 2)  # tp is the inner axis
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[2], whole[3])
    assert not torch.equal(whole[0], whole[2])
    assert len({tuple(mask.tolist()) for mask in run_distributed(_drawn, 4, True, 2, 2)}) == 4


def _attention_drops(tp, cp):
    """Returns what attention to ones makes of ones, and whether the stream that ranks share is where it was."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model_parallel_manual_seed(5)
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "context_parallel_size": cp}
    attention = DotProductAttention(TransformerConfig(**sizes, tensor_model_parallel_size=tp, attention_dropout=0.5))
    before = torch.get_rng_state()
    try:
        output = attention(*(torch.ones(8, 1, 2, 4) for _ in range(3)))
        return output, torch.equal(torch.get_rng_state(), before)
    finally:
        get_rng_tracker().reset()


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_attention_dropout_differs_between_ranks(tp, cp):
    (first, first_kept), (second, second_kept) = run_distributed(_attention_drops, 2, tp, cp)
    assert first_kept and second_kept
    assert not torch.equal(first, second)
    assert (first < 1).any() and (first > 1).any()
