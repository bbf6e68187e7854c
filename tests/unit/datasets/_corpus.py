"""Small corpora for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from corpus import prepare
from corpus_writer import IndexedDatasetBuilder
from numpy.typing import DTypeLike

from core.datasets.indexed_dataset import IndexedDataset


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype: DTypeLike = np.uint16) -> IndexedDataset:
    """Returns a corpus of one sequence per document, opened."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")
    return IndexedDataset(prefix)


def random_documents(seed: int, count: int, max_length: int, vocabulary: int = 50) -> list[list[int]]:
    """Makes documents of 0 to `max_length` tokens, none of them the last entry of the vocabulary."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary - 1, rng.integers(0, max_length + 1)).tolist() for _ in range(count)]


def corpus_in(folder: Path) -> Path:
    """Writes a small corpus, and returns its prefix."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"the square of {i} is {i * i}, and its cube is {i**3}" for i in range(400)))
    prepare([text], folder / "numbers", tokenizer="byte", split_on="line")
    return folder / "numbers"
