"""Converts text to a corpus: reads documents, tokenises them in worker processes, writes them in the order of reading.

The order, and so every byte of the corpus, does not depend on the number of workers. Memory is bounded for a corpus of
any size: a few MiB per worker, plus its longest document.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from byte_tokenizer import ByteTokenizer
from corpus_writer import IndexedDatasetBuilder
from numpy.typing import NDArray
from text_sources import Format, Record, SplitOn, find_files, parse_record, read_records, resolve_format

from shardstack.base.errors import ConfigError, DataError, MissingExtraError
from shardstack.datasets.indexed_dataset import DType, get_bin_path, get_idx_path
from shardstack.tokenizers import (
    END_OF_DOCUMENT,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_path,
    tokenizers_library,
)

if TYPE_CHECKING:
    from tqdm import tqdm

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PreparedCorpus:
    """The corpus that :func:`prepare` wrote."""

    prefix: str
    num_files: int
    num_documents: int
    num_tokens: int
    """End-of-document tokens included."""
    vocab_size: int


class _Chunk(NamedTuple):
    """Records of one file that are sent to a worker together."""

    name: str
    file_format: Literal["text", "jsonl"]
    records: list[Record]
    disk_bytes: int


class _Encoded(NamedTuple):
    tokens: NDArray[Any]
    lengths: list[int]


def prepare(
    inputs: Iterable[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] = "byte",
    vocab_size: int = 32768,
    eod_token: str | None = None,
    file_format: Format = "auto",
    json_key: str = "text",
    split_on: SplitOn = "file",
    bpe_training_bytes: int = 256 << 20,
    workers: int = 1,
    progress: bool = False,
) -> PreparedCorpus:
    """Writes ``<output_prefix>.bin``, ``.idx`` and ``.tokenizer.json`` from text and JSON-lines files.

    Creates the folder of the prefix. Ends each document with the tokenizer's end-of-document token and skips empty
    documents. Files get their final names when they are complete.

    Args:
        inputs: files, folders and glob patterns; see `text_sources.find_files`.
        tokenizer: `"byte"`, `"bpe"` (learned from the corpus itself) or the path of a ``tokenizer.json``.
        vocab_size: limit of entries that a BPE learns.
        eod_token: the end-of-document token, if the tokenizer file's folder does not say which it is.
        json_key: the key of a JSON object's text.
        split_on: what ends a document of a text file.
        bpe_training_bytes: characters at the beginning of the corpus that a BPE learns from.
        workers: processes that tokenise; 1 uses this process.
        progress: draw a progress bar on stderr (extra `train`).

    Raises:
        DataError: an input is missing, damaged or without text, or the output cannot be written.
        ConfigError: `workers` or `vocab_size` is out of range.
        MissingExtraError: a library of the extra `train` is not installed.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it takes 1 or more")
    if bpe_training_bytes < 1:
        raise ConfigError(f"bpe_training_bytes is {bpe_training_bytes}; a BPE learns from a positive number of them")
    prefix = os.fspath(output_prefix)
    _check_folder(Path(prefix))
    files = find_files(inputs, file_format)

    def chunks(task: str) -> Iterator[_Chunk]:
        with _progress_bar(files, task) if progress else contextlib.nullcontext() as bar:
            for path in files:
                for chunk in _chunks(path, resolve_format(path, file_format), split_on):
                    yield chunk
                    if bar is not None:
                        bar.update(chunk.disk_bytes)

    if tokenizer == "byte":
        chosen: Tokenizer = ByteTokenizer()
    elif tokenizer == "bpe":
        pieces = chunks("reading for the BPE")
        texts = (parse_record(r, c.name, c.file_format, json_key) for c in pieces for r in c.records)
        chosen = train_bpe(_first(texts, bpe_training_bytes), vocab_size)
    else:
        chosen = load_tokenizer(tokenizer, eod_token)
    num_documents = num_tokens = 0
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        with IndexedDatasetBuilder(get_bin_path(prefix), DType.optimal_dtype(chosen.vocab_size)) as builder:
            for encoded in _encode_all(chunks("tokenising"), chosen, json_key, workers):
                ends = list(itertools.accumulate(encoded.lengths))
                for start, end in itertools.pairwise([0, *ends]):
                    builder.add_document(encoded.tokens[start:end], [end - start])
                num_documents += len(ends)
                num_tokens += len(encoded.tokens)
            if num_documents == 0:
                shown = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
                raise DataError(f"the corpus is empty: no document with text in {len(files)} files ({shown})")
            get_idx_path(prefix).unlink(
                missing_ok=True
            )  # an old corpus must not be read with the new tokenizer either
            chosen.save(tokenizer_path(prefix))
            builder.finalize(get_idx_path(prefix))
    except OSError as error:
        raise DataError(f"{prefix}: the corpus cannot be written ({error.strerror or error})") from error
    return PreparedCorpus(prefix, len(files), num_documents, num_tokens, chosen.vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE on `texts`, reading them once; every text round-trips.

    The vocabulary is smaller than `vocab_size` if the texts have too few pairs to merge.

    Raises:
        ConfigError: `vocab_size` has no room for the 256 bytes and the end-of-document token.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}; a byte-level BPE has 256 bytes and {END_OF_DOCUMENT}: 257")
    library = tokenizers_library()
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, END_OF_DOCUMENT)


def _chunks(path: Path, file_format: Literal["text", "jsonl"], split_on: SplitOn) -> Iterator[_Chunk]:
    records: list[Record] = []
    size = disk_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal disk_bytes
        disk_bytes += num_bytes

    for record in read_records(path, file_format, split_on, count):
        records.append(record)
        size += len(record.content)
        if size >= _CHUNK_BYTES:
            yield _Chunk(str(path), file_format, records, disk_bytes)
            records, size, disk_bytes = [], 0, 0
    yield _Chunk(str(path), file_format, records, disk_bytes)


def _encode_all(chunks: Iterable[_Chunk], tokenizer: Tokenizer, json_key: str, workers: int) -> Iterator[_Encoded]:
    """Yields the tokens of each chunk, in the order of `chunks`."""
    if workers == 1:
        for chunk in chunks:
            yield _encode(chunk, tokenizer, json_key)
        return
    content = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
    # Spawned, not forked: the caller may have threads and process groups that do not survive a fork.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(content, tokenizer.eod_token, json_key),
    )
    waiting: collections.deque[Future[_Encoded]] = collections.deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError("a tokenising process died, most likely for lack of memory; use fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, str] | None = None
"""Tokenizer and JSON key of a worker process; `_start_worker` sets it once. None in the parent."""


def _start_worker(tokenizer_json: str | None, eod_token: str, json_key: str) -> None:
    """Prepares a worker. Without JSON its tokenizer is the `ByteTokenizer`."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    tokenizer = ByteTokenizer() if tokenizer_json is None else tokenizer_from_json(tokenizer_json, eod_token)
    _worker = tokenizer, json_key


def _encode_in_worker(chunk: _Chunk) -> _Encoded:
    if _worker is None:
        raise RuntimeError("the worker was not started by _start_worker")
    return _encode(chunk, *_worker)


def _encode(chunk: _Chunk, tokenizer: Tokenizer, json_key: str) -> _Encoded:
    eod = np.array([tokenizer.eod], np.int32)
    parts: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    for record in chunk.records:
        text = parse_record(record, chunk.name, chunk.file_format, json_key)
        try:
            ids = tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"{chunk.name}, line {record.line}: {error}") from None
        if len(ids):
            parts += [ids, eod]
            lengths.append(len(ids) + 1)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    return _Encoded(np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype), lengths)


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        if seen >= limit:
            return
        seen += len(text)
        yield text


def _check_folder(prefix: Path) -> None:
    """Raises, before any work, if the output cannot be written."""
    folder = prefix.parent
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(f"{folder}: the output folder cannot be created, {existing} is a file; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"{folder}: the output folder cannot be written; make it writable, or choose another")
    if not prefix.name or prefix.is_dir():
        raise DataError(f"{prefix}: a folder, and the output prefix is a path in one; try {prefix / 'corpus'}")


def _progress_bar(files: list[Path], task: str) -> tqdm[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        raise MissingExtraError("tqdm", "train", "A progress bar") from None
    total_bytes = sum(path.stat().st_size for path in files)
    return tqdm(total=total_bytes, desc=task, unit="B", unit_scale=True, unit_divisor=1024)
