"""Computes which tokens make sample i: shuffles documents over epochs, concatenates them, and cuts samples.

The design and every random draw are Megatron-LM's (its GPTDataset and `build_sample_idx`): the same corpus, seed and
sizes give the same samples in the same order. Cumulative sums and binary search replace its compiled loop, in blocks,
so that working memory stays small compared with the result.

    document_index [E * N]         documents of E epochs, shuffled together
    sample_index   [samples + 1, 2] where sample i starts: (position in document_index, token in that document)
    shuffle_index  [samples]        a permutation of the samples

Sample i covers the sequence_length + 1 tokens from its start; the last one is the first of sample i + 1.

A cache on disk keeps them, safe when all ranks of a run start at once. An entry is a folder named by the hash of its
key, with one ``.npy`` per array and a ``description.json``. It is written under a temporary name and renamed, so that
a reader sees all of it or nothing. Readers memory-map it, so that the ranks of a machine share one copy in memory. An
entry that does not match its description (truncated, overwritten, bits flipped) is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import DataError
from ..base.files import DISK_FULL, open_in_place, read_json
from .indexed_dataset import IndexedDataset

_BLOCK_DOCUMENTS = 1 << 21
_SEPARATE_BELOW = 0.80  # a last epoch shorter than this share is shuffled by itself, so that earlier ones stay whole

_DRAFT = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}(\.old)?")

Arrays = dict[str, NDArray[Any]]


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
    document_index = np.concatenate([_shuffle(np.tile(documents, count), draws) for count in epochs])
    total_samples = (num_epochs * tokens_per_epoch - 1) // sequence_length
    sample_index = locate_samples(lengths, document_index, sequence_length, total_samples)
    bounds = [0, total_samples] if separate_from is None else [0, separate_from, total_samples]
    dtype = np.uint32 if total_samples < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [_shuffle(np.arange(start, stop, dtype=dtype), draws) for start, stop in itertools.pairwise(bounds)]
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": np.concatenate(parts)}


def locate_samples(
    lengths: NDArray[np.int32], document_index: NDArray[Any], sequence_length: int, num_samples: int
) -> NDArray[Any]:
    """Returns where samples start, and the last ends: (position in `document_index`, token) `[n + 1, 2]`."""
    result = np.empty((num_samples + 1, 2), _index_dtype(len(document_index)))
    first = 0
    tokens_before = 0
    for block in range(0, len(document_index), _BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[document_index[block : block + _BLOCK_DOCUMENTS]], dtype=np.int64)
        stop = min(num_samples + 1, -(-(tokens_before + int(ends[-1])) // sequence_length))
        starts = np.arange(first, stop, dtype=np.int64) * sequence_length - tokens_before
        position = np.searchsorted(ends, starts, side="right")  # right: no sample starts in a document without tokens
        result[first:stop, 0] = position + block
        result[first:stop, 1] = starts - np.where(position > 0, ends[position - 1], 0)
        first = stop
        tokens_before += int(ends[-1])
    return result


def load_or_build(directory: Path, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays of `key`, memory-mapped. Calls `build` if the cache does not have them.

    If several processes of a machine call it at once, one builds and the others wait. On a file system without locks
    each builds, with the same result.

    Args:
        key: everything that the arrays depend on, as JSON values.

    Raises:
        DataError: the cache folder cannot be written.
    """
    text = json.dumps(key, sort_keys=True)
    entry = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
    if (arrays := _load(entry, text)) is not None:
        return arrays
    with _one_at_a_time(directory) as has_lock:
        if (arrays := _load(entry, text)) is None:
            new_arrays = build()
            try:
                for draft in directory.iterdir() if has_lock else ():  # left by a process that was killed
                    if _DRAFT.fullmatch(draft.name):
                        shutil.rmtree(draft, ignore_errors=True)
                _store(entry, text, new_arrays)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise _unwritable(directory, error) from error
                warnings.warn(
                    f"{directory}: the order of samples is not kept ({error.strerror}), but computed again; make room",
                    stacklevel=2,
                )
            arrays = _load(entry, text) or new_arrays
    return arrays


def check_tokens(
    corpus: IndexedDataset, vocab_size: int | None, cache_dir: Path, identity: list[dict[str, Any]]
) -> None:
    """Refuses a corpus with tokens outside of the embedding. The range of its tokens is computed once and cached."""
    if corpus.dtype.kind not in "iu":
        raise DataError(f"{corpus.idx_path}: tokens are {corpus.dtype.name}; a language model needs integers")
    limits = np.iinfo(corpus.dtype)
    if vocab_size is None or (limits.min >= 0 and limits.max < vocab_size):
        return
    key = {"what": "token range", "corpus": identity}

    def token_range() -> Arrays:
        extremes = [(chunk.min(), chunk.max()) for chunk in corpus.iterate_tokens()]
        return {"range": np.array([min(extremes)[0], max(high for _, high in extremes)], np.int64)}

    low, high = map(int, load_or_build(cache_dir, key, token_range)["range"])
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{corpus.bin_path}: holds token id {low if low < 0 else high}, and the vocabulary has {vocab_size} "
            "entries; prepare the corpus with the model's tokenizer, or enlarge the vocabulary"
        )


def identity_of(corpus: IndexedDataset) -> list[dict[str, Any]]:
    """Returns what identifies the content of a corpus, without its folder, because mounts differ between machines.

    The token file is identified by its size and its times of modification and change; the latter cannot be set. The
    lengths of sequences, which alone decide the order of samples, are hashed.
    """
    stats = [(path.name, path.stat()) for path in (corpus.idx_path, corpus.bin_path)]
    identities: list[dict[str, Any]] = [
        {"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats
    ]
    identities[0]["lengths_crc32"] = zlib.crc32(np.ascontiguousarray(corpus.sequence_lengths).data.cast("B"))
    identities[1]["changed_ns"] = stats[1][1].st_ctime_ns
    return identities


def _shuffle(values: NDArray[Any], draws: np.random.RandomState) -> NDArray[Any]:
    draws.shuffle(values)
    return values


def _index_dtype(size: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if size <= np.iinfo(np.int32).max else np.int64


def _load(entry: Path, key: str) -> Arrays | None:
    try:
        description = read_json(entry / "description.json")
        if description["key"] != key:
            return None
        arrays: Arrays = {}
        for name, checksum in description["crc32"].items():
            arrays[name] = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if _crc32(arrays[name]) != checksum:
                return None
        return arrays
    except Exception:  # missing or damaged: JSON, numpy's header parser and mmap each raise other errors
        return None


def _store(entry: Path, key: str, arrays: Arrays) -> None:
    draft = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        for name, values in arrays.items():
            np.save(draft / f"{name}.npy", values, allow_pickle=False)
        description = {"key": key, "crc32": {name: _crc32(values) for name, values in arrays.items()}}
        (draft / "description.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):  # a damaged entry; processes that have it mapped keep their pages
            aside = draft.with_name(f"{draft.name}.old")
            entry.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            draft.rename(entry)
        except OSError:
            if not entry.exists():  # without locks another builder may have been faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _crc32(values: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B"))


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[bool]:
    """Holds a lock, which the kernel releases if the process dies. Yields False if the system has no locks."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_in_place(directory / "lock", os.O_WRONLY | os.O_CREAT), "wb")
    except OSError as error:
        raise _unwritable(directory, error) from error
    with file:
        has_lock = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            has_lock = True
        yield has_lock


def _unwritable(directory: Path, error: OSError) -> DataError:
    return DataError(
        f"{directory}: the index cache cannot be written ({error.strerror}); make the folder writable, or choose "
        "another as cache_dir"
    )
