"""Samples: their tokens against the concatenated documents, masks and positions by hand, and what is refused."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.base.errors import ConfigError, DataError
from core.datasets.gpt_dataset import SPLITS, GPTDataset, GPTDatasetConfig, document_range
from tests.unit.datasets._corpus import random_documents, write_corpus


def _dataset(
    tmp_path: Path, documents: list[list[int]], length: int = 4, num_samples: int | None = None, **fields: Any
) -> GPTDataset:
    """Returns the training split, of all documents."""
    config = GPTDatasetConfig(sequence_length=length, split="1", **fields)
    return GPTDataset(write_corpus(tmp_path / "c", documents), "train", config, num_samples)


@pytest.mark.parametrize("seed", range(6))
def test_samples_are_cut_from_shuffled_documents(tmp_path: Path, seed: int):
    documents = random_documents(seed, 40, 15)
    dataset = _dataset(tmp_path, documents, 7, 90, random_seed=seed)
    order = dataset._document_index.tolist()
    flat = [token for document in order for token in documents[document]]
    pieces = [flat[start : start + 8] for start in range(0, len(flat) - 7, 7)]
    assert len(dataset) == len(pieces) >= 90
    for i, which in enumerate(dataset._shuffle_index.tolist()):
        item = dataset[i]
        assert item["tokens"].tolist() + item["labels"][-1:].tolist() == pieces[which]
        assert torch.equal(item["labels"][:-1], item["tokens"][1:])
    assert sorted(dataset._shuffle_index.tolist()) == list(range(len(pieces)))


def test_items_are_tensors_of_the_declared_dtypes(tmp_path: Path):
    item = _dataset(tmp_path, [list(range(20))])[0]
    assert {name: (value.shape, value.dtype) for name, value in item.items()} == {
        "tokens": ((4,), torch.int64),
        "labels": ((4,), torch.int64),
        "loss_mask": ((4,), torch.float32),
        "position_ids": ((4,), torch.int64),
        "attention_mask": ((1, 4, 4), torch.bool),
    }
    assert item["position_ids"].tolist() == [0, 1, 2, 3]
    assert item["loss_mask"].tolist() == [1, 1, 1, 1]


def test_end_of_document_resets_positions_and_masks_the_loss(tmp_path: Path):
    def item(**fields: Any) -> dict[str, torch.Tensor]:
        return _dataset(tmp_path, [[9, 5, 6, 9, 9, 7, 8, 9, 1]], 8, eod=9, **fields)[0]

    both = item(reset_position_ids=True, eod_mask_loss=True)
    assert both["tokens"].tolist() == [9, 5, 6, 9, 9, 7, 8, 9]
    assert both["position_ids"].tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert both["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    apart = item(reset_attention_mask=True)
    assert apart["document_starts"].tolist() == [0, 1, 1, 1, 4, 5, 5, 5]
    assert apart["position_ids"].tolist() == list(range(8))
    neither = item()
    assert "document_starts" not in neither
    assert neither["position_ids"].tolist() == list(range(8))
    assert neither["loss_mask"].tolist() == [1] * 8


def test_a_mask_hides_later_tokens_and_other_documents(tmp_path: Path):
    def item(**fields: Any) -> dict[str, torch.Tensor]:
        return _dataset(tmp_path, [[5, 9, 6, 7, 8]], eod=9, **fields)[0]

    assert item()["attention_mask"].int().tolist() == [[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]]
    apart = item(reset_attention_mask=True)["attention_mask"]
    assert apart.int().tolist() == [[[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]]
    assert "attention_mask" not in item(create_attention_mask=False)


def test_splits_are_disjoint_document_ranges(tmp_path: Path):
    documents = [[number] * 10 for number in range(100)]
    corpus = write_corpus(tmp_path / "c", documents)
    config = GPTDatasetConfig(sequence_length=4, split="80,15,5")
    seen = []
    for split in SPLITS:
        dataset = GPTDataset(corpus, split, config)
        seen.append({token for item in dataset for token in item["tokens"].tolist()})
    assert seen == [set(range(80)), set(range(80, 95)), set(range(95, 100))]


@pytest.mark.parametrize(
    ("shares", "ranges"),
    [
        ("969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        ("90,10", [(0, 900), (900, 1000), (1000, 1000)]),
        ("1", [(0, 1000), (1000, 1000), (1000, 1000)]),
        ("0.5,0.25,0.25", [(0, 500), (500, 750), (750, 1000)]),
        ("0,1,0", [(0, 0), (0, 1000), (1000, 1000)]),
    ],
)
def test_shares_become_ranges(shares: str, ranges: list[tuple[int, int]]):
    assert [document_range(1000, split, shares) for split in ("train", "valid", "test")] == ranges


def test_the_cache_follows_corpus_and_settings(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c", random_documents(0, 30, 20))
    config = GPTDatasetConfig(sequence_length=5, split="1", vocab_size=100, cache_dir=tmp_path / "cache")

    def entries() -> int:
        return sum(path.is_dir() for path in (tmp_path / "cache").iterdir())

    first = GPTDataset(corpus, "train", config, 40)
    assert entries() == 2  # samples, and the range of the tokens
    again = GPTDataset(corpus, "train", config, 40)
    assert entries() == 2
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, again, strict=True))
    GPTDataset(corpus, "train", config, 41)
    assert entries() == 3
    rewritten = write_corpus(tmp_path / "c", [document[::-1] for document in random_documents(0, 30, 20)])
    later_ns = rewritten.bin_path.stat().st_mtime_ns + 10**9
    os.utime(rewritten.bin_path, ns=(later_ns, later_ns))  # of the same size, and only later
    GPTDataset(rewritten, "train", config, 40)
    assert entries() == 5


def test_pickling_carries_neither_tokens_nor_indices(tmp_path: Path):
    dataset = _dataset(tmp_path, random_documents(0, 2000, 20), 5)
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data)[17]["tokens"], dataset[17]["tokens"])


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path):
    documents = [[1, 2, 3, 300, 4], [5] * 10]
    assert len(_dataset(tmp_path, documents, vocab_size=301)) == 3
    with pytest.raises(DataError, match=r"c\.bin: holds token id 300, and the vocabulary has 300 entries; prepare"):
        _dataset(tmp_path, documents, vocab_size=300)


def test_negative_and_fractional_tokens_are_refused(tmp_path: Path):
    config = GPTDatasetConfig(sequence_length=2, split="1", vocab_size=10)
    with pytest.raises(DataError, match="holds token id -1"):
        GPTDataset(write_corpus(tmp_path / "a", [[1, -1, 2]], np.int32), "train", config)
    with pytest.raises(DataError, match="tokens are float32; a language model needs integers"):
        GPTDataset(write_corpus(tmp_path / "b", [[1, 2, 3]], np.float32), "train", config)


def test_splits_that_hold_no_sample_are_refused(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c", [[1] * 10] * 5)
    with pytest.raises(DataError, match="split 'test' of '969,30,1' gets none of the 5 documents; give it a larger"):
        GPTDataset(corpus, "test", GPTDatasetConfig(sequence_length=4))
    with pytest.raises(DataError, match=r"split 'valid' .* has 10 tokens in 1 documents, and one sample takes 11"):
        GPTDataset(corpus, "valid", GPTDatasetConfig(sequence_length=10, split="4,1"))
    assert len(GPTDataset(corpus, "valid", GPTDatasetConfig(sequence_length=9, split="4,1"))) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"split": "a,b"}, "split is 'a,b'; it takes one to three shares"),
        ({"split": "0,0,0"}, "shares that are not all zero"),
        ({"split": "1,1,1,1"}, "one to three shares"),
        ({"split": "-1,2"}, "split is '-1,2'"),
        ({"split": "nan"}, "split is 'nan'"),
        ({"random_seed": -1}, "random_seed is -1"),
        ({"eod_mask_loss": True}, "eod_mask_loss needs to know the end-of-document token"),
        ({"reset_position_ids": True}, "reset_position_ids needs"),
        ({"reset_attention_mask": True}, "reset_attention_mask needs"),
    ],
)
def test_unsupported_settings_are_refused(fields: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        GPTDatasetConfig(**{"sequence_length": 4, **fields})


def test_indices_outside_the_split_end_an_iteration(tmp_path: Path):
    dataset = _dataset(tmp_path, [[1] * 9])
    assert len(list(dataset)) == len(dataset) == 2
    with pytest.raises(IndexError, match="sample -1 of a split of 2"):
        dataset[-1]
    with pytest.raises(ConfigError, match="num_samples is 0"):
        GPTDataset(dataset.corpus, "train", dataset.config, 0)


def test_too_large_order_is_refused_early(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"99999999999999 samples of 4 tokens .* their order alone takes \d+ GiB"):
        _dataset(tmp_path, [list(range(20))], num_samples=99999999999999)


def test_corpora_with_equal_file_stats_have_their_own_order(tmp_path: Path):
    config = GPTDatasetConfig(sequence_length=4, split="1", vocab_size=100)
    first = write_corpus(tmp_path / "c", [list(range(9)), list(range(4))])
    times = [(path, path.stat()) for path in (tmp_path / "c.idx", tmp_path / "c.bin")]
    GPTDataset(first, "train", config)
    before = {path.name for path in (tmp_path / "c.cache").iterdir()}
    second = write_corpus(tmp_path / "c", [list(range(4)), list(range(9))])
    for path, stat in times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size
    GPTDataset(second, "train", config)
    assert (
        len({path.name for path in (tmp_path / "c.cache").iterdir()} - before) == len(before) - 1
    )  # but for the lock
