"""Hidden dropout: when it acts, and which random stream it draws from."""

import torch

from core import parallel_state
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from core.transformer.dropout import hidden_dropout
from tests.unit._spawn import run_distributed

ONES = torch.ones(64)


def test_it_acts_in_training_with_a_probability():
    assert hidden_dropout(ONES, 0.0, training=True, sequence_parallel=False) is ONES
    assert hidden_dropout(ONES, 0.5, training=False, sequence_parallel=False) is ONES
    dropped = hidden_dropout(ONES, 0.5, training=True, sequence_parallel=False)
    assert set(dropped.tolist()) == {0.0, 2.0}


def _drawn(sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_manual_seed(5)
    try:
        return hidden_dropout(ONES, 0.5, training=True, sequence_parallel=sequence_parallel)
    finally:
        get_rng_tracker().reset()


def test_ranks_share_a_mask_unless_they_hold_parts_of_the_sequence():
    first, second = run_distributed(_drawn, 2, False)
    assert torch.equal(first, second)
    first, second = run_distributed(_drawn, 2, True)
    assert not torch.equal(first, second)
