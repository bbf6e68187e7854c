"""Computes which tokens make sample i: shuffles documents over epochs, concatenates them, and cuts samples.

The design and every random draw are Megatron-LM's (its GPTDataset and `build_sample_idx`): the same corpus, seed and
sizes give the same samples in the same order. Cumulative sums and binary search replace its compiled loop, in blocks,
so that working memory stays small compared with the result.

    document_index [E * N]         documents of E epochs, shuffled together
    sample_index   [samples + 1, 2] where sample i starts: (position in document_index, token in that document)
    shuffle_index  [samples]        a permutation of the samples

Sample i covers the sequence_length + 1 tokens from its start; the last one is the first of sample i + 1.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_DOCUMENTS = 1 << 21
_SEPARATE_BELOW = 0.80  # a last epoch shorter than this share is shuffled by itself, so that earlier ones stay whole


def build_indices(
    lengths: NDArray[np.int32],
    first_document: int,
    last_document: int,
    sequence_length: int,
    num_samples: int | None,
    seed: int,
) -> dict[str, NDArray[Any]]:
    """Builds the three indices for documents `[first_document, last_document)` and at least `num_samples` samples.

    Args:
        lengths: tokens in each document of the corpus, `[documents]`. The split must have more than `sequence_length`.
        num_samples: None means the samples of one epoch.
    """
    tokens_per_epoch = int(lengths[first_document:last_document].sum(dtype=np.int64))
    num_epochs = 1
    if num_samples is not None:
        num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    separate_from = None
    if num_epochs > 1 and num_samples is not None:
        samples_before = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
        samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
        if num_samples - samples_before < int(_SEPARATE_BELOW * samples_per_epoch):
            separate_from = samples_before

    draws = np.random.RandomState(seed)  # numpy never changes its stream: an order is the same in all versions
    epochs = [num_epochs] if separate_from is None else [num_epochs - 1, 1]
    documents = np.arange(first_document, last_document, dtype=_index_dtype(last_document))
    document_index = np.concatenate([_shuffled(np.tile(documents, count), draws) for count in epochs])
    total_samples = (num_epochs * tokens_per_epoch - 1) // sequence_length
    sample_index = locate_samples(lengths, document_index, sequence_length, total_samples)
    bounds = [0, total_samples] if separate_from is None else [0, separate_from, total_samples]
    dtype = np.uint32 if total_samples < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [_shuffled(np.arange(start, stop, dtype=dtype), draws) for start, stop in itertools.pairwise(bounds)]
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": np.concatenate(parts)}


def locate_samples(
    lengths: NDArray[np.int32], document_index: NDArray[Any], sequence_length: int, num_samples: int
) -> NDArray[Any]:
    """Returns where samples start, and the last ends: (position in `document_index`, token) `[n + 1, 2]`."""
    result = np.empty((num_samples + 1, 2), _index_dtype(len(document_index)))
    located = 0
    tokens_before = 0
    for block in range(0, len(document_index), _BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[document_index[block : block + _BLOCK_DOCUMENTS]], dtype=np.int64)
        stop = min(num_samples + 1, -(-(tokens_before + int(ends[-1])) // sequence_length))
        starts = np.arange(located, stop, dtype=np.int64) * sequence_length - tokens_before
        position = np.searchsorted(ends, starts, side="right")  # right: no sample starts in a document without tokens
        result[located:stop, 0] = position + block
        result[located:stop, 1] = starts - np.where(position > 0, ends[position - 1], 0)
        located = stop
        tokens_before += int(ends[-1])
    return result


def _shuffled(values: NDArray[Any], draws: np.random.RandomState) -> NDArray[Any]:
    draws.shuffle(values)
    return values


def _index_dtype(size: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if size <= np.iinfo(np.int32).max else np.int64
