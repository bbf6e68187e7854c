"""The shuffled index against an oracle that walks token by token, on many small random corpora."""

import numpy as np
import pytest

from core.datasets import sample_index
from core.datasets.sample_index import build_indices, locate_samples


def _walk(lengths: list[int], order: list[int], sequence_length: int) -> list[tuple[int, int]]:
    """Starts of samples: the first token, and every `sequence_length`-th from there that exists."""
    places = [(position, token) for position, document in enumerate(order) for token in range(lengths[document])]
    return places[::sequence_length]


def _expected(lengths: list[int], first: int, last: int, sequence_length: int, num_samples: int | None, seed: int):
    """Applies Megatron-LM's rules for the number of epochs, a last epoch shuffled apart, and its order of draws."""
    tokens = sum(lengths[first:last])
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * sequence_length + 1:
        epochs += 1
    draws = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values)
        draws.shuffle(array)
        return array.tolist()

    total = (epochs * tokens - 1) // sequence_length
    before = ((epochs - 1) * tokens - 1) // sequence_length
    documents = list(range(first, last))
    if epochs > 1 and num_samples - before < int(0.80 * ((tokens - 1) // sequence_length)):
        order = shuffled(documents * (epochs - 1)) + shuffled(documents)
        shuffle = shuffled(list(range(before))) + shuffled(list(range(before, total)))
    else:
        order = shuffled(documents * epochs)
        shuffle = shuffled(list(range(total)))
    return order, _walk(lengths, order, sequence_length)[: total + 1], shuffle


def _random_case(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, rng.integers(3, 30)).tolist()
    lengths[1] += 9  # some document of the range has tokens
    last = int(rng.integers(2, len(lengths) + 1))
    sequence_length = int(rng.integers(1, 9))
    tokens = sum(lengths[1:last])
    num_samples = None if seed % 5 == 0 else int(rng.integers(1, 5 * tokens // sequence_length + 2))
    return lengths, 1, last, sequence_length, num_samples, seed


@pytest.mark.parametrize("block", [1, 3, 1 << 21])
def test_indices_equal_reference_walk(monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(sample_index, "_BLOCK_DOCUMENTS", block)
    cases_of_several_epochs = 0
    for seed in range(120):
        lengths, *rest = case = _random_case(seed)
        actual = build_indices(np.array(lengths, np.int32), *rest)
        order, samples, shuffle = _expected(*case)
        assert actual["document_index"].tolist() == order
        assert [tuple(row) for row in actual["sample_index"].tolist()] == samples
        assert actual["shuffle_index"].tolist() == shuffle
        cases_of_several_epochs += len(order) > len(set(order))
        if rest[3] is not None:
            assert len(shuffle) >= rest[3]
    assert cases_of_several_epochs > 40


def test_short_last_epoch_is_shuffled_separately():
    lengths = np.full(10, 10, np.int32)
    num_samples = 25  # 2.5 epochs of 10 samples: the half epoch must come last
    actual = build_indices(lengths, 0, 10, 10, num_samples, seed=3)
    assert sorted(actual["document_index"][:20].tolist()) == sorted([*range(10)] * 2)
    assert sorted(actual["document_index"][20:].tolist()) == [*range(10)]
    assert sorted(actual["shuffle_index"][:19].tolist()) == [*range(19)]


def test_dtypes_are_small_and_lengths_do_not_overflow():
    lengths = np.full(4, 2**31 - 1, np.int32)
    starts = locate_samples(lengths, np.arange(4, dtype=np.int32), 2**30, 7)
    assert starts.dtype == np.int32
    flat = [int(position) * (2**31 - 1) + int(offset) for position, offset in starts]
    assert flat == [i * 2**30 for i in range(8)]


def test_only_the_seed_changes_the_order():
    lengths = np.full(50, 7, np.int32)
    first, again, other = (build_indices(lengths, 0, 50, 5, None, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["shuffle_index"], other["shuffle_index"])
