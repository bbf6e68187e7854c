"""The corpus of a run, and its tokenizer: files, Megatron-LM's names for them, or what needs no files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from corpus import prepare
from corpus_writer import IndexedDatasetBuilder
from text_sources import standard_library_sources

from shardstack.base.device import barrier
from shardstack.base.errors import ConfigError, DataError
from shardstack.datasets.indexed_dataset import DType, IndexedDataset, get_bin_path, get_idx_path
from shardstack.tokenizers import END_OF_DOCUMENT, NullTokenizer, Tokenizer, load_tokenizer, tokenizers_library
from shardstack.training.config.sections import DataConfig

STANDARD_LIBRARY_VOCABULARY = 2048  # entries of the BPE that is learned from it
MOCK_DOCUMENTS, MOCK_LENGTH = 2000, 4096  # documents of mock data, and their longest one
_OF_JSON = (
    *("HuggingFaceTokenizer", "Llama2Tokenizer", "Llama3Tokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
)


def find_corpus(data: DataConfig, folder: Path = Path("data")) -> Path:
    """Returns the corpus of a run, which the first rank makes on first use where no files are given."""
    if data.mock_data:
        vocab_size = tokenizer.vocab_size if (tokenizer := find_tokenizer(data)) else data.vocab_size
        if vocab_size is None:
            raise ConfigError("mock_data has no vocabulary of its own; give --vocab-size, or a tokenizer")
        prefix = folder / f"mock-{vocab_size}"
    elif data.data_path is not None:
        return data.data_path
    else:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        prefix = folder / f"python-{python}-standard-library-bpe{STANDARD_LIBRARY_VOCABULARY}"
    if dist.get_rank() == 0 and not IndexedDataset.exists(prefix):
        folder.mkdir(parents=True, exist_ok=True)
        if data.mock_data:
            write_mock(prefix, vocab_size)
        else:
            sources = standard_library_sources()
            prepare(sources, prefix, tokenizer="bpe", vocab_size=STANDARD_LIBRARY_VOCABULARY, progress=True)
    barrier()
    return prefix


def write_mock(prefix: Path, vocab_size: int) -> None:
    """Writes documents of random length that count up, as Megatron-LM's mock data do."""
    dtype = DType.optimal_dtype(vocab_size)
    with IndexedDatasetBuilder(get_bin_path(prefix), dtype) as builder:
        for length in np.random.default_rng(0).integers(1, MOCK_LENGTH, MOCK_DOCUMENTS):
            tokens = np.append(np.arange(1, length) % vocab_size, vocab_size - 1)
            builder.add_document(tokens.astype(dtype), [length])
        builder.finalize(get_idx_path(prefix))


def find_tokenizer(data: DataConfig) -> Tokenizer | NullTokenizer | None:
    """Returns the tokenizer that `tokenizer_type` and its files name. None: the one next to the corpus.

    Raises:
        ConfigError: a type that cannot be read here, or a file that it needs is not given.
    """
    kind, files = data.tokenizer_type, (data.vocab_file, data.merge_file)
    if kind == "NullTokenizer":
        if data.vocab_size is None or data.vocab_size < 2:
            raise ConfigError(f"tokenizer_type NullTokenizer has vocab_size {data.vocab_size} ids; give a number")
        return NullTokenizer(data.vocab_size - 1)
    if kind == "GPT2BPETokenizer" or any(files):
        if None in files:
            raise ConfigError("a GPT2BPETokenizer is two files; give --vocab-file and --merge-file")
        return _gpt2_tokenizer(*files)  # type: ignore[arg-type]
    if kind is not None and kind not in _OF_JSON:
        raise ConfigError(
            f"tokenizer_type {kind} cannot be read here; convert it to a tokenizer.json, and give its path as "
            "--tokenizer-model with --tokenizer-type HuggingFaceTokenizer"
        )
    path = data.tokenizer_model
    if path is None:
        if kind is not None:
            raise ConfigError(f"tokenizer_type {kind} needs its tokenizer.json; give the path as --tokenizer-model")
        return None
    if path.suffix == ".model":
        if not path.with_name("tokenizer.json").exists():
            raise ConfigError(
                f"tokenizer_model {path} is a file of sentencepiece, which is not read here; put the tokenizer.json "
                "of the same model next to it (it is in Hugging Face's folder of that model)"
            )
        path = path.with_name("tokenizer.json")
    return load_tokenizer(path / "tokenizer.json" if path.is_dir() else path)


def _gpt2_tokenizer(vocab_file: Path, merge_file: Path) -> Tokenizer:
    library = tokenizers_library()
    try:
        backend = library.Tokenizer(library.models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # the library has no class of its own
        raise DataError(f"{vocab_file} and {merge_file} are no BPE of GPT-2 ({error}); see --vocab-file") from None
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    return Tokenizer(backend, END_OF_DOCUMENT)
