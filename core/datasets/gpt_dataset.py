"""Packs the documents of a corpus into samples of fixed length for a causal language model.

Items of a :class:`GPTDataset` are already shuffled: 0, 1, 2, ... is the training order. It depends only on the corpus,
the split, the sequence length, the seed and `num_samples`. The same inputs give the order of Megatron-LM's GPTDataset.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .. import host_memory
from ..errors import ConfigError, DataError
from ..ranges import check_range
from .index_cache import default_directory, load_or_build
from .indexed_dataset import IndexedDataset
from .sample_index import build_indices

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

_ALGORITHM = 1  # part of the cache's key; increase it when the same inputs give other arrays


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Settings of a dataset. Field names are Megatron-LM's where it has them.

    Raises:
        ConfigError: a value is out of range, or an option needs `eod` and it is None.
    """

    sequence_length: int
    """Tokens in a sample's input, and in its labels."""

    random_seed: int = 1234
    """Seed of the order of documents and samples, 0 to 2**32 - 1."""

    split: str = "969,30,1"
    """Shares of the documents for training (the first ones), validation (the next ones) and test (the last ones)."""

    vocab_size: int | None = None
    """Entries of the model's embedding. A corpus with a larger token is refused. None means no check."""

    eod: int | None = None
    """Id of the end-of-document token, for the three options below."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""

    reset_attention_mask: bool = False
    """Return the start of each token's document, so that attention can be restricted to it."""

    eod_mask_loss: bool = False
    """Mask the loss where the input is an end of document, whose label is the start of an unrelated one."""

    cache_dir: Path | None = None
    """Folder of the index cache. None: `<prefix>.cache`, next to the corpus."""

    def __post_init__(self) -> None:
        check_range(self, "sequence_length", least=1, takes="a positive number of tokens")
        check_range(self, "random_seed", least=0, below=2**32, takes=f"0 to {2**32 - 1}")
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if self.eod is None and getattr(self, name):
                raise ConfigError(f"{name} needs to know the end-of-document token: set eod to its id")
        parse_shares(self.split)


_ORDER_BYTES = 24
"""Working memory per sample while the order is computed: its start, and its place in the order."""


class GPTDataset(Dataset[dict[str, torch.Tensor]]):
    """The samples of one split.

    An item is a dict of tensors of shape `[s]`: `tokens` (int64), `labels` (int64, the next tokens), `loss_mask`
    (float32) and `position_ids` (int64); with `reset_attention_mask` also `document_starts` (int64), the position at
    which each token's document begins. An end of document is the last token of its document.

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
        _check_count(num_samples, config)
        cache_dir = config.cache_dir or default_directory(corpus.prefix)
        identity = _identity(corpus)
        _check_tokens(corpus, config.vocab_size, cache_dir, identity)
        key = {
            "what": "samples",
            "algorithm": _ALGORITHM,
            "corpus": identity,
            "documents": [first, last],
            "sequence_length": config.sequence_length,
            "num_samples": num_samples,
            "seed": config.random_seed,
        }
        arrays = load_or_build(
            cache_dir,
            key,
            lambda: build_indices(
                corpus.sequence_lengths, first, last, config.sequence_length, num_samples, config.random_seed
            ),
        )
        # Memory-mapped from the cache, or built in memory if the disk is full; fixed. See `sample_index`.
        self._document_index = arrays["document_index"]
        self._sample_index = arrays["sample_index"]
        self._shuffle_index = arrays["shuffle_index"]

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
        if self.config.eod is not None:
            is_end = tokens.eq(self.config.eod)
            starts = torch.zeros_like(positions)
            starts[1:] = torch.where(is_end[:-1], positions[1:], 0)
            starts = starts.cummax(0).values  # [s], the start of each token's document
            if self.config.eod_mask_loss:
                loss_mask[is_end] = 0.0
            if self.config.reset_position_ids:
                sample["position_ids"] = positions - starts
            if self.config.reset_attention_mask:
                sample["document_starts"] = starts
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


def document_range(num_documents: int, split: SplitName, shares: str) -> tuple[int, int]:
    """Returns the documents `[first, last)` of a split. Rounds shares as Megatron-LM does."""
    parsed = parse_shares(shares)
    bounds = [0.0]
    for share in parsed:
        bounds.append(bounds[-1] + share / sum(parsed))
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


def _check_count(num_samples: int | None, config: GPTDatasetConfig) -> None:
    """Refuses a number of samples whose order does not fit into memory, before computing it."""
    if num_samples is not None and num_samples * _ORDER_BYTES > host_memory.total_bytes():
        raise ConfigError(
            f"{num_samples} samples of {config.sequence_length} tokens are asked for, and their order alone takes "
            f"{num_samples * _ORDER_BYTES / 2**30:.0f} GiB; lower train_iters or the global batch size"
        )


def _check_tokens(
    corpus: IndexedDataset, vocab_size: int | None, cache_dir: Path, identity: list[dict[str, Any]]
) -> None:
    """Refuses a corpus with tokens outside of the embedding. The range of its tokens is computed once and cached."""
    if corpus.dtype.kind not in "iu":
        raise DataError(f"{corpus.idx_path}: tokens are {corpus.dtype.name}; a language model needs integers")
    limits = np.iinfo(corpus.dtype)
    if vocab_size is None or (limits.min >= 0 and limits.max < vocab_size):
        return
    key = {"what": "token range", "corpus": identity}
    low, high = (int(value) for value in load_or_build(cache_dir, key, lambda: _token_range(corpus))["range"])
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{corpus.bin_path}: holds token id {low if low < 0 else high}, and the vocabulary has {vocab_size} "
            "entries; prepare the corpus with the model's tokenizer, or enlarge the vocabulary"
        )


def _token_range(corpus: IndexedDataset) -> dict[str, NDArray[Any]]:
    extremes = [(chunk.min(), chunk.max()) for chunk in corpus.iterate_tokens()]
    lows, highs = zip(*extremes, strict=True)
    return {"range": np.array([min(lows), max(highs)], np.int64)}


def _identity(corpus: IndexedDataset) -> list[dict[str, Any]]:
    """Returns what identifies the content of a corpus, without its folder, because mounts differ between machines.

    The token file is identified by its size and its times of modification and change; the latter cannot be set. The
    lengths of sequences, which alone decide the order of samples, are hashed.
    """
    stats = [(path.name, path.stat()) for path in (corpus.idx_path, corpus.bin_path)]
    named: list[dict[str, Any]] = [
        {"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats
    ]
    named[0]["lengths_crc32"] = zlib.crc32(np.ascontiguousarray(corpus.sequence_lengths).data.cast("B"))
    named[1]["changed_ns"] = stats[1][1].st_ctime_ns
    return named
