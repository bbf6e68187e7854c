"""Packs the documents of a corpus into samples of fixed length for a causal language model.

Items of a :class:`GPTDataset` are already shuffled: 0, 1, 2, ... is the training order. It depends only on the corpus,
the split, the sequence length, the seed and `num_samples`. The same inputs give the order of Megatron-LM's GPTDataset.
"""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..base.device import host_memory_bytes
from ..base.errors import ConfigError, DataError, check_range
from ..base.megatron_names import takes_megatron_fields
from .indexed_dataset import IndexedDataset
from .sample_index import build_indices, check_tokens, identity_of, load_or_build

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

Blend: TypeAlias = tuple[list[str], list[float] | None]

_ALGORITHM = 1  # part of the cache's key; increase it when the same inputs give other arrays

_ORDER_BYTES = 24
"""Working memory per sample while the order is computed: its start, and its place in the order."""


class Vocabulary(Protocol):
    """What a config reads of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...


@takes_megatron_fields
@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Settings of a dataset. Fields have Megatron-LM's names where it has them.

    Raises:
        ConfigError: a value is out of range, an option needs `eod` and it is None, or `eod` and `vocab_size` are not
            the tokenizer's.
    """

    sequence_length: int
    """Tokens in a sample's input, and in its labels."""

    random_seed: int = 1234
    """Seed of the order of documents and samples, 0 to 2**32 - 1."""

    split: str = "969,30,1"
    """Shares of the documents for training (the first ones), validation (the next ones) and test (the last ones)."""

    vocab_size: int | None = None
    """Entries of the model's embedding. A corpus with a larger token is refused. None: not checked."""

    eod: int | None = None
    """Id of the end-of-document token, for the three options below."""

    tokenizer: Vocabulary | None = None
    """Gives `vocab_size` and `eod`. None: the two are given, or not needed."""

    blend: Blend | None = None
    """The path of a corpus for `BlendedMegatronDatasetBuilder`, as ``([path], None)``. None: mock data."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""

    reset_attention_mask: bool = False
    """Return the start of each token's document, so that attention can be restricted to it."""

    create_attention_mask: bool = True
    """Return the attention mask of each sample, with `s x s` elements. Models here need none: attention is causal, and
    `reset_attention_mask` returns what documents need."""

    eod_mask_loss: bool = False
    """Mask the loss where the input is an end of document, whose label is the start of an unrelated one."""

    cache_dir: Path | None = None
    """Folder of the index cache. None: `<prefix>.cache`, next to the corpus."""

    def __post_init__(self) -> None:
        check_range(self, "sequence_length", least=1, takes="a positive number of tokens")
        check_range(self, "random_seed", least=0, below=2**32, takes=f"0 to {2**32 - 1}")
        for name in ("vocab_size", "eod") if self.tokenizer is not None else ():
            value, of_tokenizer = getattr(self, name), getattr(self.tokenizer, name)
            if value not in (None, of_tokenizer):
                raise ConfigError(f"{name} is {value}, and the tokenizer's is {of_tokenizer}; give one of the two")
            object.__setattr__(self, name, of_tokenizer)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if self.eod is None and getattr(self, name):
                raise ConfigError(f"{name} needs to know the end-of-document token: set eod to its id")
        parse_shares(self.split)


class GPTDataset(Dataset[dict[str, torch.Tensor]]):
    """The samples of one split.

    An item is a dict of tensors of shape `[s]`: `tokens` (int64), `labels` (int64, the next tokens), `loss_mask`
    (float32) and `position_ids` (int64); with `reset_attention_mask` also `document_starts` (int64), the position at
    which each token's document begins; with `create_attention_mask` also `attention_mask` `[1, s, s]`, True where a
    token does not see another one. An end of document is the last token of its document.

    Args:
        corpus: token file whose sequences are documents.
        num_samples: minimum number of items, over as many epochs as needed. None means one epoch.

    Raises:
        DataError: the split has no document or too few tokens for one sample, a token exceeds the vocabulary, or the
            cache cannot be written.
    """

    def __init__(
        self, corpus: IndexedDataset, split: SplitName, config: GPTDatasetConfig, num_samples: int | None = None
    ) -> None:
        if num_samples is not None and num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}; it takes a positive number, or None for one epoch")
        self.corpus, self.split, self.config, self.num_samples = corpus, split, config, num_samples
        first, last = document_range(len(corpus), split, config.split)
        _check_size(corpus, split, config, first, last)
        if num_samples is not None and num_samples * _ORDER_BYTES > host_memory_bytes():
            raise ConfigError(
                f"{num_samples} samples of {config.sequence_length} tokens are asked for, and their order alone takes "
                f"{num_samples * _ORDER_BYTES / 2**30:.0f} GiB; lower train_iters or the global batch size"
            )
        arrays = self._load_indices(first, last)
        self._document_index = arrays["document_index"]
        self._sample_index = arrays["sample_index"]
        self._shuffle_index = arrays["shuffle_index"]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Opens a corpus. Megatron-LM's name."""
        return IndexedDataset(dataset_path)

    def _load_indices(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        """Returns `build_indices` of documents `[first, last)`, from the cache if it has them."""
        corpus, config = self.corpus, self.config
        cache_dir = config.cache_dir or Path(f"{corpus.prefix}.cache")
        identity = identity_of(corpus)
        check_tokens(corpus, config.vocab_size, cache_dir, identity)
        key = {
            "what": "samples",
            "algorithm": _ALGORITHM,
            "corpus": identity,
            "documents": [first, last],
            "sequence_length": config.sequence_length,
            "num_samples": self.num_samples,
            "seed": config.random_seed,
        }
        return load_or_build(cache_dir, key, lambda: self._build_indices(first, last))

    def _build_indices(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        lengths, config = self.corpus.sequence_lengths, self.config
        return build_indices(lengths, first, last, config.sequence_length, self.num_samples, config.random_seed)

    def __reduce__(self) -> tuple[type[GPTDataset], tuple[Any, ...]]:
        # A loader's worker maps the same files again; pickling would send gigabytes of index.
        return type(self), (self.corpus, self.split, self.config, self.num_samples)

    def __len__(self) -> int:
        return len(self._shuffle_index)

    def order_fingerprint(self) -> str:
        """Returns a fingerprint of the order of samples: their number and a hash of the first ones."""
        first = np.asarray(self._shuffle_index[:4096], np.int64)
        starts = np.asarray(self._document_index[:4096], np.int64)
        return f"{len(self)}-{zlib.crc32(starts.tobytes(), zlib.crc32(first.tobytes())):08x}"

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of a split of {len(self)} samples")
        text = torch.from_numpy(self._read(int(self._shuffle_index[idx])))  # [s + 1]
        tokens, labels = text[:-1], text[1:]  # [s]
        loss_mask = torch.ones(len(tokens), dtype=torch.float32)
        positions = torch.arange(len(tokens))
        sample = {"tokens": tokens, "labels": labels.clone(), "loss_mask": loss_mask, "position_ids": positions}
        starts = torch.zeros_like(positions)  # [s], the start of each token's document
        if self.config.eod is not None:
            is_end = tokens.eq(self.config.eod)
            starts[1:] = torch.where(is_end[:-1], positions[1:], 0)
            starts = starts.cummax(0).values
            if self.config.eod_mask_loss:
                loss_mask[is_end] = 0.0
            if self.config.reset_position_ids:
                sample["position_ids"] = positions - starts
            if self.config.reset_attention_mask:
                sample["document_starts"] = starts
        if self.config.create_attention_mask:
            is_hidden = positions > positions.unsqueeze(1)  # [s, s], rows are the tokens that see others
            if self.config.reset_attention_mask:
                is_hidden |= positions < starts.unsqueeze(1)
            sample["attention_mask"] = is_hidden.unsqueeze(0)
        return sample

    def _read(self, sample: int) -> NDArray[np.int64]:
        """Returns the `sequence_length + 1` tokens of a sample, given its index before shuffling."""
        position, offset = (int(value) for value in self._sample_index[sample])
        text = np.empty(self.config.sequence_length + 1, np.int64)
        stop = 0
        while stop < len(text):
            document = int(self._document_index[position])
            available = int(self.corpus.sequence_lengths[document]) - offset
            part = self.corpus.get(document, offset, min(available, len(text) - stop))
            text[stop : stop + len(part)] = part
            stop += len(part)
            position, offset = position + 1, 0
        return text


class MockCorpus:
    """A corpus without files, as Megatron-LM's: 100,000 documents of 1 to 4,095 tokens that count from 1.

    Counts that exceed the vocabulary start again at 0, and skip the end of document, which is each document's last
    token. Lengths have a seed of their own, so that every config reads the same documents.

    Raises:
        ConfigError: the config does not say which token ends a document, or has fewer than two tokens.
    """

    prefix = "mock data"

    def __init__(self, config: GPTDatasetConfig) -> None:
        if config.eod is None or config.vocab_size is None or config.vocab_size < 2:
            raise ConfigError(
                f"mock data needs a vocabulary of two tokens and more, and has eod {config.eod} and vocab_size "
                f"{config.vocab_size}; give the config a tokenizer"
            )
        self._eod, self._vocab_size = config.eod, config.vocab_size
        self.sequence_lengths = np.random.default_rng(0).integers(1, 4096, 100_000, np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Returns `length` tokens of document `idx` from token `offset` on, or up to its end if `length` is None."""
        total = int(self.sequence_lengths[idx])
        stop = total if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1) % (self._vocab_size - 1)
        tokens += tokens >= self._eod
        tokens[total - 1 - offset :] = self._eod
        return tokens


class MockGPTDataset(GPTDataset):
    """A `GPTDataset` of a `MockCorpus`, for trying a loop out. Its three splits are equally large.

    Has Megatron-LM's samples, in the same order, if the vocabulary has at least 4,097 tokens and ends with the end of
    document.
    """

    def __init__(
        self, corpus: MockCorpus, split: SplitName, config: GPTDatasetConfig, num_samples: int | None = None
    ) -> None:
        # What a dataset reads of a corpus for each sample; files and their cache are read by `_load_indices`.
        super().__init__(cast(IndexedDataset, corpus), split, replace(config, split="1,1,1"), num_samples)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockCorpus:  # type: ignore[override]
        """Returns the corpus, which has no path. The name is Megatron-LM's."""
        return MockCorpus(config)

    def _load_indices(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        return self._build_indices(first, last)


def document_range(num_documents: int, split: SplitName, shares: str) -> tuple[int, int]:
    """Returns the documents `[first, last)` of a split. Rounds shares as Megatron-LM does."""
    share_list = parse_shares(shares)
    bounds = [*itertools.accumulate((share / sum(share_list) for share in share_list), initial=0.0)]
    which = SPLITS.index(split)
    return round(bounds[which] * num_documents), round(bounds[which + 1] * num_documents)


def parse_shares(text: str) -> list[float]:
    """Parses a `split` into shares of training, validation and test, in any unit.

    Raises:
        ConfigError: `text` is no list of one to three shares.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    shares += [0.0] * (len(SPLITS) - len(shares))
    if len(shares) > len(SPLITS) or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split is {text!r}; it takes one to three shares that are not all zero, like '969,30,1'")
    return shares


def _check_size(corpus: IndexedDataset, split: str, config: GPTDatasetConfig, first: int, last: int) -> None:
    if first == last:
        raise DataError(
            f"{corpus.prefix}: split {split!r} of {config.split!r} gets none of the {len(corpus)} documents; "
            "give it a larger share, or more documents"
        )
    tokens = int(corpus.sequence_lengths[first:last].sum(dtype=np.int64))
    if tokens <= config.sequence_length:
        raise DataError(
            f"{corpus.prefix}: split {split!r} of {config.split!r} has {tokens} tokens in {last - first} documents, "
            f"and one sample takes {config.sequence_length + 1}; give it a larger share, more text, or shorter samples"
        )
