"""Datasets and tokenizers by Megatron-LM's names: mock data, one corpus, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from core.base.errors import ConfigError
from core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockCorpus, MockGPTDataset
from core.datasets.utils import compile_helpers
from core.tokenizers import MegatronTokenizer
from tests.unit.datasets._corpus import write_corpus


def tokenizer(size: int):
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=size)


def config(size: int = 64, sequence_length: int = 16, **fields: object) -> GPTDatasetConfig:
    return GPTDatasetConfig(sequence_length=sequence_length, tokenizer=tokenizer(size), **fields)


def test_a_null_tokenizer_gives_vocabulary_and_end_of_document(tmp_path: Path):
    metadata = tmp_path / "tokenizer_metadata.json"
    metadata.write_text(json.dumps({"library": "null-text"}))
    made = MegatronTokenizer.from_pretrained(metdata_path=str(metadata), vocab_size=64)
    assert made == tokenizer(64) and (made.vocab_size, made.eod) == (65, 64)
    assert (config().vocab_size, config().eod) == (65, 64)
    with pytest.raises(ConfigError, match=r"library 'huggingface' .*load_tokenizer"):
        MegatronTokenizer.from_pretrained("folder", {"library": "huggingface"})
    with pytest.raises(ConfigError, match="vocab_size None"):
        MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"})
    with pytest.raises(ConfigError, match="eod is 3, and the tokenizer's is 64"):
        config(eod=3)


def test_metadata_that_cannot_be_read_is_one_error(tmp_path: Path):
    file = tmp_path / "metadata.json"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe", "x" * 300, "a\0b", ""):
        with pytest.raises(ConfigError, match="the tokenizer's metadata cannot be read from"):
            MegatronTokenizer.from_pretrained(metadata_path=path, vocab_size=8)
    for text, said in (
        (b"[" * 100000, "cannot be read"),
        (b"\xff{}", "cannot be read"),
        (b"", "cannot be read"),
        (b"[1]", r"library \[1\]"),
        (b"null", "library None"),
        (b'{"library": ["null-text"]}', r"library \['null-text'\]"),
        (b'{"library": "' + b"x" * 5000 + b'"}', "library 'xxx"),
    ):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=said) as caught:
            MegatronTokenizer.from_pretrained(metadata_path=file, vocab_size=8)
        assert len(str(caught.value)) < 500
    for size in (True, 1.5, "8", 0, None):
        with pytest.raises(ConfigError, match="takes a positive number"):
            MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=size)  # type: ignore


def test_mock_documents_count_within_the_vocabulary():
    corpus = MockCorpus(config(5000))
    length = int(corpus.sequence_lengths[7])
    assert corpus.get(7).tolist() == [*range(1, length), 5000]
    assert corpus.get(7, 3, length - 3).tolist() == corpus.get(7).tolist()[3:]
    small = MockCorpus(GPTDatasetConfig(sequence_length=4, vocab_size=4, eod=1))
    document = next(i for i, length in enumerate(small.sequence_lengths) if length > 8)
    assert small.get(document, 0, 6).tolist() == [2, 3, 0, 2, 3, 0] and small.get(document)[-1] == 1
    with pytest.raises(ConfigError, match="mock data needs a vocabulary"):
        MockCorpus(GPTDatasetConfig(sequence_length=4))


def test_mock_data_is_built_for_three_splits():
    long = config(sequence_length=512)  # of 200 million tokens
    train, valid, test = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, None, 3], lambda: True, long).build()
    compile_helpers()
    assert min(len(train), len(valid), len(test)) > 100
    item = train[5]
    assert torch.equal(pickle.loads(pickle.dumps(train))[5]["tokens"], item["tokens"])
    assert not torch.equal(item["tokens"], valid[5]["tokens"]) and item["attention_mask"].shape == (1, 512, 512)
    assert np.isin(item["tokens"].numpy(), range(65)).all()
    assert BlendedMegatronDatasetBuilder(MockGPTDataset, [1, 1, 1], lambda: False, config()).build() == [None] * 3


def test_one_corpus_is_built_and_blends_are_refused(tmp_path: Path):
    corpus = write_corpus(tmp_path / "c", [[n] * 20 for n in range(10)])
    given = config(blend=([corpus.prefix], None), split="8,2,0", random_seed=3)
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, [30, None, None], lambda: True, given).build()
    assert len(train) >= 30 and test is None
    own = GPTDataset(corpus, "valid", given)
    assert [item["tokens"].tolist() for item in own] == [item["tokens"].tolist() for item in valid]
    for blend in (["a", "b"], None), (["a"], [1.0]):
        with pytest.raises(ConfigError, match="one corpus is read"):
            BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config(blend=blend))
    with pytest.raises(ConfigError, match="GPTDataset reads a corpus"):
        BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config())
    with pytest.raises(ConfigError, match="MockGPTDataset reads no corpus"):
        BlendedMegatronDatasetBuilder(MockGPTDataset, [1, 1, 1], lambda: True, given)
    with pytest.raises(ConfigError, match="sizes is"):
        BlendedMegatronDatasetBuilder(GPTDataset, [1, 1], lambda: True, given)
    with pytest.raises(ConfigError, match="blend_per_split"):
        config(blend_per_split=[(["a"], None)] * 3)
