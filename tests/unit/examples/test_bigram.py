"""The baseline against a table of counts made one pair at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np

from examples.gpt.bigram import _first, add_one_bigram_loss


def test_the_loss_is_that_of_counted_pairs_for_every_cut():
    generator = np.random.default_rng(0)
    vocab_size = 7
    tokens, held_out = generator.integers(0, vocab_size, 200), generator.integers(0, vocab_size, 50)
    tokens[tokens == 6] = 0  # 6 is never seen before another
    counts = np.zeros((vocab_size, vocab_size))
    for a, b in itertools.pairwise(tokens):
        counts[a, b] += 1
    expected = np.mean(
        [-math.log((counts[a, b] + 1) / (counts[a].sum() + vocab_size)) for a, b in itertools.pairwise(held_out)]
    )
    for cuts in ([], [1], [13, 14, 150]):
        chunks = [chunk.astype(np.uint16) for chunk in np.split(tokens, cuts)]
        found = add_one_bigram_loss(chunks, held_out[:-1], held_out[1:], vocab_size)
        assert math.isclose(found, expected, rel_tol=1e-12)


def test_only_so_many_tokens_are_counted():
    documents = [np.arange(4), np.arange(3), np.arange(5)]
    assert [list(part) for part in _first(iter(documents), 6)] == [[0, 1, 2, 3], [0, 1]]
    assert [len(part) for part in _first(iter(documents), 100)] == [4, 3, 5]
