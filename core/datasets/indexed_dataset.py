"""Reads Megatron-LM's corpus format: token ids in ``<prefix>.bin``, an index in ``<prefix>.idx``.

    .idx   9 bytes   b"MMIDIDX\\x00\\x00"
           uint64    version, 1
           uint8     dtype code of the tokens (`DType`)
           uint64    S, number of sequences
           uint64    D, length of the document indices: number of documents + 1
           int32[S]  length of each sequence, in tokens
           int64[S]  where each sequence starts in the .bin, in bytes
           int64[D]  document d is sequences [indices[d], indices[d + 1])
           int8[S]   mode of each sequence, in multimodal corpora only; not read here
    .bin   the tokens of all sequences, end to end

Everything is little-endian. `examples/gpt/corpus_writer.py` writes it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.errors import DataError
from ..base.megatron_names import absent_names

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_CHECKED_AT_ONCE = 1 << 20
"""Entries of an index that are checked at a time, to bound memory."""


class DType(Enum):
    """Megatron-LM's codes of token dtypes in an index file."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: DTypeLike) -> int:
        """Returns the code of a numpy dtype. Raises `DataError` if the format has none."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise DataError(f"dtype {name} cannot be stored in an index; it has {', '.join(cls.__members__)}")
        return int(cls[name].value)

    @classmethod
    def dtype_from_code(cls, value: int) -> np.dtype[Any]:
        """Returns the numpy dtype of a code. Raises `DataError` for an unknown code."""
        if value not in {member.value for member in cls}:
            raise DataError(f"dtype code {value} is unknown; codes run from 1 to {len(cls)}")
        return np.dtype(cls(value).name).newbyteorder("<")

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> np.dtype[Any]:
        """Returns Megatron-LM's dtype for a vocabulary: uint16 below 65,500 entries, else int32."""
        return np.dtype("<u2" if cardinality is not None and cardinality < 65500 else "<i4")


class IndexFile:
    """The content of an .idx file, memory-mapped and checked against itself.

    Attributes:
        dtype: dtype of the tokens.
        lengths: `[S]`, tokens of each sequence.
        pointers: `[S]`, start of each sequence in the .bin, in bytes.
        document_indices: `[D]`, first sequence of each document, then the number of sequences.

    Raises:
        DataError: the file is missing, truncated, of another format or version, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header = file.read(HEADER.size)
        except OSError as error:
            raise DataError(_cannot_open(path, error)) from None
        if header[: len(MAGIC)] != MAGIC[: len(header)]:
            raise DataError(
                f"{path}: starts with {header[: len(MAGIC)]!r} and not {MAGIC!r}, so it is no index of this format; "
                "make one with shardstack prepare-data"
            )
        if len(header) < HEADER.size:
            raise DataError(f"{path}: truncated, {len(header)} bytes of a {HEADER.size}-byte header; prepare it again")
        _, version, code, num_sequences, num_indices = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{path}: index version {version}, only {VERSION} is read; prepare the corpus again")
        try:
            self.dtype = DType.dtype_from_code(code)
        except DataError as error:
            raise DataError(f"{path}: {error}; the index is damaged, prepare the corpus again") from None
        index_bytes = HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (index_bytes, index_bytes + num_sequences):  # with modes: one byte more for each sequence
            state = "truncated" if size < index_bytes else "too long"
            raise DataError(
                f"{path}: {state}, {size} bytes where {num_sequences} sequences and {num_indices} document indices "
                f"take {index_bytes}; prepare the corpus again"
            )
        content = np.memmap(path, dtype=np.uint8, mode="r")
        self.lengths = np.frombuffer(content, "<i4", num_sequences, HEADER.size)
        self.pointers = np.frombuffer(content, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_indices = np.frombuffer(content, "<i8", num_indices, HEADER.size + 12 * num_sequences)
        if num_indices == 0 or self.document_indices[0] != 0 or self.document_indices[-1] != num_sequences:
            ends = [int(value) for value in self.document_indices[[0, -1]]] if num_indices else []
            raise DataError(
                f"{path}: documents must span sequences 0 to {num_sequences}, found {ends}; prepare the corpus again"
            )
        self._check_order(path)

    def check_tokens(self, bin_path: Path) -> None:
        """Raises `DataError` unless the token file has the size that the index says."""
        try:
            num_bytes = bin_path.stat().st_size
        except OSError as error:
            raise DataError(_cannot_open(bin_path, error)) from None
        token_bytes = 0
        if len(self.lengths):
            token_bytes = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if num_bytes != token_bytes:
            state = "truncated" if num_bytes < token_bytes else "longer than its index says"
            raise DataError(
                f"{bin_path}: {state}, {num_bytes} bytes where the index says {token_bytes}; prepare the corpus again"
            )

    def _check_order(self, path: Path) -> None:
        """Refuses invalid lengths, starts that do not follow from the lengths, and documents out of order."""
        end = 0
        for start in range(0, len(self.lengths), _CHECKED_AT_ONCE):
            lengths = self.lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            places = self.pointers[start : start + _CHECKED_AT_ONCE]
            wrong = (lengths < 0) | (places != np.concatenate(([end], ends[:-1])))
            if wrong.any():
                index = start + int(wrong.argmax())
                raise DataError(
                    f"{path}: sequence {index} has the length {int(self.lengths[index])} and starts at byte "
                    f"{int(self.pointers[index])}, where the one before it does not end; prepare the corpus again"
                )
            end = int(ends[-1])
        for start in range(0, len(self.document_indices), _CHECKED_AT_ONCE):
            if (np.diff(self.document_indices[start : start + _CHECKED_AT_ONCE + 1]) < 0).any():
                raise DataError(f"{path}: documents go back; the index is damaged, prepare the corpus again")


def _cannot_open(path: Path, error: OSError) -> str:
    hint = "check the prefix, or make the corpus with shardstack prepare-data"
    if path.stem.endswith((".bin", ".idx")):
        hint = "the prefix is the path without .bin or .idx"
    return f"{path}: cannot be read ({error.strerror}); {hint}"


def get_idx_path(path_prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of a corpus's index file."""
    return Path(f"{os.fspath(path_prefix)}.idx")


def get_bin_path(path_prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of a corpus's token file."""
    return Path(f"{os.fspath(path_prefix)}.bin")


class IndexedDataset:
    """A memory-mapped corpus: opening it reads only the index, and processes share the pages that they read.

    Items are read-only numpy arrays of token ids, one per sequence. Modes of a multimodal index are ignored.

    Raises:
        DataError: a file is missing, truncated, of another format or version, does not match the other one, or has no
            tokens.
    """

    def __init__(self, path_prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(path_prefix)
        self.idx_path, self.bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        index = IndexFile(self.idx_path)
        if len(index.lengths) == 0 or int(index.pointers[-1]) + int(index.lengths[-1]) == 0:
            raise DataError(f"{self.idx_path}: the corpus is empty (no token); prepare it again from non-empty text")
        index.check_tokens(self.bin_path)
        self.dtype = index.dtype
        """Dtype of the tokens on disk."""
        self.sequence_lengths = index.lengths
        """Tokens in each sequence, `[num_sequences]`."""
        self.document_indices = index.document_indices
        """`[num_documents + 1]`: document d is sequences `[indices[d], indices[d + 1])`."""
        self._pointers = index.pointers
        self._bytes = np.memmap(self.bin_path, dtype=np.uint8, mode="r")

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)  # a loader's worker opens the files again

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Returns whether both files of the corpus exist."""
        return get_idx_path(path_prefix).is_file() and get_bin_path(path_prefix).is_file()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @overload
    def __getitem__(self, idx: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, idx: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, idx: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(idx, slice):
            return [self.get(i) for i in range(*idx.indices(len(self)))]
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns `length` tokens of sequence `idx` from token `offset` on, or up to its end if `length` is None.

        Raises:
            IndexError: there is no such sequence.
            DataError: the range exceeds the sequence, or the index points beyond the token file.
        """
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of a corpus of {len(self)} sequences")
        total = int(self.sequence_lengths[idx])
        if length is None:
            length = total - offset
        if offset < 0 or length < 0 or offset + length > total:
            raise DataError(f"tokens [{offset}, {offset + length}) of sequence {idx}, which has {total} tokens")
        start = int(self._pointers[idx]) + offset * self.dtype.itemsize
        try:
            return np.frombuffer(self._bytes, self.dtype, length, start) if length else np.empty(0, self.dtype)
        except ValueError:
            raise DataError(
                f"{self.idx_path}: sequence {idx} is said to start at byte {start}, but {self.bin_path} "
                f"has {self._bytes.size} bytes; the index is damaged, prepare the corpus again"
            ) from None

    def iterate_tokens(self, chunk_tokens: int = 1 << 24) -> Iterator[NDArray[Any]]:
        """Yields all tokens of the corpus in file order, as views of at most `chunk_tokens`."""
        tokens = self._bytes.view(self.dtype)
        for start in range(0, len(tokens), chunk_tokens):
            yield tokens[start : start + chunk_tokens]


__getattr__ = absent_names(__name__)
