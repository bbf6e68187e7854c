"""Reads, checks and writes the index of a corpus, ``<prefix>.idx``; `indexed_dataset` has its format."""

from __future__ import annotations

import struct
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
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
        """Returns the code of a numpy dtype; raises `DataError` if the format has none."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise DataError(f"dtype {name} cannot be stored in an index; it has {', '.join(cls.__members__)}")
        return int(cls[name].value)

    @classmethod
    def dtype_from_code(cls, value: int) -> np.dtype[Any]:
        """Returns the numpy dtype of a code; raises `DataError` for an unknown code."""
        if value not in {member.value for member in cls}:
            raise DataError(f"dtype code {value} is unknown; codes run from 1 to {len(cls)}")
        dtype: np.dtype[Any] = np.dtype(cls(value).name).newbyteorder("<")
        return dtype

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
        document_indices: `[D]`.

    Raises:
        DataError: the file is missing, truncated, of another format or version, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
        except OSError as error:
            raise DataError(_cannot_open(path, error)) from None
        if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
            raise DataError(
                f"{path}: starts with {header[: len(_MAGIC)]!r} and not {_MAGIC!r}, so it is no index of this format; "
                "make one with prepare_data.py"
            )
        if len(header) < _HEADER.size:
            raise DataError(
                f"{path}: truncated, {len(header)} bytes of a {_HEADER.size}-byte header; prepare it again"
            )
        _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
        if version != _VERSION:
            raise DataError(f"{path}: index version {version}, only {_VERSION} is read; prepare the corpus again")
        try:
            self.dtype = DType.dtype_from_code(code)
        except DataError as error:
            raise DataError(f"{path}: {error}; the index is damaged, prepare the corpus again") from None
        expected = _HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (expected, expected + num_sequences):  # with modes: one byte more for each sequence
            state = "truncated" if size < expected else "too long"
            raise DataError(
                f"{path}: {state}, {size} bytes where {num_sequences} sequences and {num_indices} document indices "
                f"take {expected}; prepare the corpus again"
            )
        content = np.memmap(path, dtype=np.uint8, mode="r")
        self.lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size)
        self.pointers = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
        self.document_indices = np.frombuffer(content, "<i8", num_indices, _HEADER.size + 12 * num_sequences)
        if num_indices == 0 or self.document_indices[0] != 0 or self.document_indices[-1] != num_sequences:
            ends = [int(value) for value in self.document_indices[[0, -1]]] if num_indices else []
            raise DataError(
                f"{path}: documents must span sequences 0 to {num_sequences}, found {ends}; the index is damaged, "
                "prepare the corpus again"
            )
        self._check_order(path)

    def check_tokens(self, bin_path: Path) -> None:
        """Raises `DataError` unless the token file has the size that the index says."""
        try:
            found = bin_path.stat().st_size
        except OSError as error:
            raise DataError(_cannot_open(bin_path, error)) from None
        expected = 0
        if len(self.lengths):
            expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if found != expected:
            state = "truncated" if found < expected else "longer than its index says"
            raise DataError(
                f"{bin_path}: {state}, {found} bytes where the index says {expected}; prepare the corpus again"
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
                    f"{int(self.pointers[index])}, where the one before it does not end; the index is damaged, "
                    "prepare the corpus again"
                )
            end = int(ends[-1])
        for start in range(0, len(self.document_indices), _CHECKED_AT_ONCE):
            if (np.diff(self.document_indices[start : start + _CHECKED_AT_ONCE + 1]) < 0).any():
                raise DataError(f"{path}: documents go back; the index is damaged, prepare the corpus again")


def write_index(
    file: BinaryIO, dtype: np.dtype[Any], lengths: NDArray[np.int32], document_indices: NDArray[np.int64]
) -> None:
    """Writes an index of sequences that are stored end to end.

    Args:
        dtype: dtype of the tokens.
        lengths: `[S]`, tokens of each sequence.
        document_indices: `[D]`.
    """
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= dtype.itemsize
    code = DType.code_from_dtype(dtype)
    file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(document_indices)))
    for values, stored in ((lengths, "<i4"), (pointers, "<i8"), (document_indices, "<i8")):
        file.write(values.astype(stored, copy=False).tobytes())


def _cannot_open(path: Path, error: OSError) -> str:
    hint = "check the prefix, or make the corpus with prepare_data.py"
    if path.stem.endswith((".bin", ".idx")):
        hint = "the prefix is the path without .bin or .idx"
    return f"{path}: cannot be read ({error.strerror}); {hint}"
