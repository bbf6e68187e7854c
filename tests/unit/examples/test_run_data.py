"""The corpus and the tokenizer of a run, by Megatron-LM's names, and documents that are made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from core.base.errors import ConfigError, DataError
from core.datasets.indexed_dataset import IndexedDataset
from core.tokenizers import NullTokenizer, Tokenizer
from core.training.config.sections import DataConfig
from examples.gpt.corpus import train_bpe
from examples.gpt.run_data import MOCK_DOCUMENTS, find_corpus, find_tokenizer


def settings(**changes: Any) -> DataConfig:
    return DataConfig(seq_length=8, micro_batch_size=1, **changes)


@pytest.fixture
def bpe(tmp_path: Path) -> Tokenizer:
    """A small BPE, whose folder has it as tokenizer.json, and as vocab.json and merges.txt of GPT-2."""
    tokenizer = train_bpe(["low lower lowest", "new newer newest"] * 3, 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    model = json.loads(tokenizer.to_json())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return tokenizer


def test_files_of_gpt2_are_its_tokenizer(bpe: Tokenizer, tmp_path: Path):
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    for kind in ("GPT2BPETokenizer", None):
        found = find_tokenizer(settings(tokenizer_type=kind, **files))
        assert isinstance(found, Tokenizer)
        assert found.encode("newest lower!").tolist() == bpe.encode("newest lower!").tolist()
        assert (found.vocab_size, found.eod) == (bpe.vocab_size, bpe.eod)
        assert found.decode(found.encode("newest lower!")) == "newest lower!"
    (tmp_path / "merges.txt").write_text("a b c d\n")
    with pytest.raises(DataError, match=r"merges\.txt are no BPE of GPT-2"):
        find_tokenizer(settings(**files))


def test_a_folder_and_a_sentencepiece_file_mean_the_json_in_it(bpe: Tokenizer, tmp_path: Path):
    for kind, name in (("HuggingFaceTokenizer", ""), ("Llama2Tokenizer", "tokenizer.model"), (None, "tokenizer.json")):
        found = find_tokenizer(settings(tokenizer_type=kind, tokenizer_model=tmp_path / name))
        assert isinstance(found, Tokenizer) and found.to_json() == bpe.to_json()
    assert find_tokenizer(settings()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_type": "TikTokenizer"}, "TikTokenizer cannot be read here; convert it to a tokenizer.json"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "two files; give --vocab-file and --merge-file"),
        ({"vocab_file": Path("v.json")}, "two files; give --vocab-file and --merge-file"),
        ({"tokenizer_type": "Llama3Tokenizer"}, "Llama3Tokenizer needs its tokenizer.json"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer has vocab_size None ids; give a number"),
        ({"tokenizer_model": Path("no/such.model")}, "such.model is a file of sentencepiece"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_one_line(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        find_tokenizer(settings(**changes))


def test_mock_documents_count_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("examples.gpt.run_data.barrier", lambda: None)
    null = settings(mock_data=True, vocab_size=100, tokenizer_type="NullTokenizer")
    found = find_tokenizer(null)
    assert isinstance(found, NullTokenizer) and (found.vocab_size, found.eod) == (100, 99)
    corpus = IndexedDataset(find_corpus(null, tmp_path))
    assert len(corpus) == MOCK_DOCUMENTS
    for index in (0, 7, MOCK_DOCUMENTS - 1):
        document = corpus[index]
        assert document.tolist() == [n % 100 for n in range(1, len(document))] + [99]
    with pytest.raises(ConfigError, match="mock_data has no vocabulary of its own; give --vocab-size"):
        find_corpus(settings(mock_data=True), tmp_path)
    assert find_corpus(settings(data_path=Path("a/b"))) == Path("a/b")
