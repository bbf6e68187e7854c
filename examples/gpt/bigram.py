"""The loss of an add-one bigram model, which counts pairs of tokens: a baseline for a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstack.datasets.gpt_dataset import GPTDataset, document_range

COUNTED_TOKENS = 20_000_000
"""Most training tokens that the baseline counts: one rank counts, and the others wait for it."""

_CHUNK_TOKENS = 1 << 22


def bigram_validation_loss(train: GPTDataset, valid: GPTDataset, num_samples: int, vocab_size: int) -> float:
    """Returns the loss, in nats per token, on the first `num_samples` samples of `valid`.

    Counts the first documents of `train`, up to `COUNTED_TOKENS` tokens.

    Args:
        vocab_size: the tokenizer's, without the padding of a model: padding would make the baseline worse.
    """
    first, last = document_range(len(train.corpus), train.split, train.config.split)
    stream = (train.corpus.get(document) for document in range(first, last))
    samples = (valid[i] for i in range(min(num_samples, len(valid))))
    pairs = [(s["tokens"][s["loss_mask"] > 0].numpy(), s["labels"][s["loss_mask"] > 0].numpy()) for s in samples]
    inputs, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return add_one_bigram_loss(_chunks(_first(stream, COUNTED_TOKENS)), inputs, labels, vocab_size)


def add_one_bigram_loss(
    chunks: Iterable[NDArray[Any]], inputs: NDArray[Any], labels: NDArray[Any], vocab_size: int
) -> float:
    """Returns the mean of -log((count(a, b) + 1) / (count(a) + V)) over pairs `inputs[i]`, `labels[i]`, in nats.

    Stores only pairs that occur, so that the vocabulary may have any size.

    Args:
        chunks: the training tokens in order, split anywhere.
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    previous: NDArray[Any] = np.empty(0, np.int64)
    for chunk in chunks:
        tokens = np.concatenate([previous, chunk.astype(np.int64)])
        found, number = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        merged, places = np.unique(np.concatenate([pairs, found]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, number]), len(merged)).astype(np.int64)
        pairs, previous = merged, tokens[-1:]
    totals = np.bincount(pairs // vocab_size, counts, vocab_size)
    asked = inputs.astype(np.int64) * vocab_size + labels
    places = np.searchsorted(pairs, asked)
    known = places < len(pairs)
    known[known] = pairs[places[known]] == asked[known]
    seen = np.zeros(len(asked))
    seen[known] = counts[places[known]]
    return float(np.mean(np.log(totals[inputs] + vocab_size) - np.log(seen + 1.0)))


def _first(documents: Iterable[NDArray[Any]], limit: int) -> Iterator[NDArray[Any]]:
    """Yields the documents that begin within the first `limit` tokens, the last one cut."""
    for document in documents:
        if limit <= 0:
            return
        yield document[:limit]
        limit -= len(document)


def _chunks(documents: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    while gathered := list(islice(documents, 512)):
        joined = np.concatenate(gathered)
        for start in range(0, len(joined), _CHUNK_TOKENS):
            yield joined[start : start + _CHUNK_TOKENS]
