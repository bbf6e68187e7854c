"""The data of a run: where its vocabulary comes from, and batches that go on where a run stopped."""

from __future__ import annotations

import itertools
import shutil
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from corpus import prepare

from core import parallel_state
from core.base.errors import ConfigError, DataError
from core.tokenizers import tokenizer_path
from core.training.data import DeviceBatches, load_data, open_batches
from tests.unit._spawn import run_distributed
from tests.unit.training._configs import small_config


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of the text" for i in range(60)))
    prepare([tmp_path / "text.txt"], tmp_path / "corpus", split_on="line")
    return tmp_path / "corpus"


def test_the_tokenizer_next_to_the_corpus_decides_the_vocabulary(corpus: Path):
    data = load_data(small_config(global_batch_size=4, eval_iters=2), corpus, 1)
    assert data.vocab_size == 384  # 257, padded
    assert data.tokenizer is not None and data.tokenizer.decode([104, 105]) == "hi"
    assert len(data.train) >= 16 and data.valid is not None and len(data.valid) >= 8
    assert load_data(small_config(eval_iters=0), corpus, 1).valid is None
    assert load_data(small_config(make_vocab_size_divisible_by=1, vocab_size=300), corpus, 1).vocab_size == 300
    with pytest.raises(ConfigError, match="vocab_size 100 is smaller than the tokenizer's 257"):
        load_data(small_config(vocab_size=100), corpus, 1)


def test_a_corpus_without_a_tokenizer_needs_a_vocabulary_size(corpus: Path, tmp_path: Path):
    shutil.move(tokenizer_path(corpus), tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match="--vocab-size"):
        load_data(small_config(), corpus, 1)
    data = load_data(small_config(vocab_size=257), corpus, 1)
    assert data.tokenizer is None and data.vocab_size == 384
    with pytest.raises(DataError, match="vocabulary has 200"):
        load_data(small_config(vocab_size=200), corpus, 1)
    named = load_data(small_config(tokenizer_model=tmp_path / "elsewhere.json"), corpus, 1)
    assert named.tokenizer is not None


def _micro_batches(prefix: Path, consumed: int, num_workers: int, **cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = small_config(global_batch_size=8, train_iters=3, eval_iters=1, num_workers=num_workers)
    parallel_state.initialize_model_parallel(**cut)
    data = load_data(config, prefix, 2)
    train = torch.stack([batch["tokens"] for batch in open_batches(data.train, config, consumed)])
    valid = torch.stack([batch["tokens"] for batch in open_batches(data.valid, config)])
    return train, valid


def test_batches_go_on_after_the_samples_that_were_consumed(corpus: Path):
    whole = run_distributed(_micro_batches, 2, corpus, 0, 0)
    later = run_distributed(_micro_batches, 2, corpus, 8, 0)
    for (train, valid), (rest, again) in zip(whole, later, strict=True):
        assert torch.equal(train[2 : 2 + len(rest)], rest)  # two micro-batches of a step on each rank
        assert len(rest) == len(train) - 2
        assert torch.equal(valid, again)
    assert not torch.equal(whole[0][0], whole[1][0])  # each rank its own


def _read_ahead(prefix: Path, stops: list[int]) -> list[torch.Tensor]:
    """Returns tokens of micro-batches of a run that stops after these steps, each time with more of them read."""
    config = small_config(global_batch_size=8, train_iters=4, num_workers=0)
    parallel_state.initialize_model_parallel()
    data = load_data(config, prefix, 2)
    found: list[torch.Tensor] = []
    with mock.patch(
        "core.training.data.DeviceBatches", partial(DeviceBatches, start_copy=lambda batch: lambda: batch)
    ):
        for first, last in itertools.pairwise([0, *stops]):
            with open_batches(data.train, config, 8 * first) as batches:
                found += [next(batches)["tokens"] for _ in range(2 * (last - first))]
    return found


def test_read_ahead_samples_are_neither_lost_nor_repeated(corpus: Path):
    for whole, continued in zip(
        run_distributed(_read_ahead, 2, corpus, [4]), run_distributed(_read_ahead, 2, corpus, [1, 3, 4]), strict=True
    ):
        assert all(map(torch.equal, whole, continued)) and len(whole) == len(continued) == 8
        assert len({tokens.numpy().tobytes() for tokens in whole}) == 8


def _first_micro_batch(prefix: Path, kind: str) -> torch.Tensor:
    return _micro_batches(prefix, 0, 0, **{kind: 2})[0][0]


@pytest.mark.parametrize("kind", ["tensor_model_parallel_size", "context_parallel_size"])
def test_ranks_of_one_model_read_the_same_whole_sequences(corpus: Path, kind: str):
    first, second = run_distributed(_first_micro_batch, 2, corpus, kind)
    assert torch.equal(first, second) and first.shape[1] == small_config().data.seq_length


def test_validation_is_left_out_where_no_document_falls_to_it(tmp_path: Path, corpus: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for split in ("100,0,0", "1"):
            assert load_data(small_config(split=split), corpus, 1).valid is None
        assert load_data(small_config(), corpus, 1).valid is not None
    (tmp_path / "one.txt").write_text("a single document of some length")
    prepare([tmp_path / "one.txt"], tmp_path / "one")
    with pytest.warns(UserWarning, match="none of its 1 documents .* 969,30,1"):
        assert load_data(small_config(), tmp_path / "one", 1).valid is None


def test_orders_of_samples_are_distinguished(corpus: Path):
    def order(**changes) -> dict:
        return dict(load_data(small_config(eval_iters=0, **changes), corpus, 1).sample_order)

    first = order(train_iters=2)
    assert first["num_samples"] == 4 and first["corpus"].startswith("corpus.bin (")
    assert order(train_iters=3)["order"] == first["order"]  # of the same single epoch
    assert len({order(**changes)["order"] for changes in ({}, {"seed": 1}, {"train_iters": 500})}) == 3
