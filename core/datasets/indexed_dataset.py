"""Reads and writes Megatron-LM's corpus format: token ids in ``<prefix>.bin``, an index in ``<prefix>.idx``.

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

Everything is little-endian. Files written here are byte for byte those that Megatron-LM writes for the same tokens.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import DataError
from ..files.durable import sync_folder
from .index_file import DType as DType  # re-exported: Megatron-LM keeps it here
from .index_file import IndexFile, write_index

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]


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
        self._index = index
        self._bytes = np.memmap(self.bin_path, dtype=np.uint8, mode="r")

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)  # a loader's worker opens the files again

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tokens on disk."""
        return self._index.dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence, `[num_sequences]`."""
        return self._index.lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """`[num_documents + 1]`: document d is sequences `[indices[d], indices[d + 1])`."""
        return self._index.document_indices

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Returns whether both files of the corpus exist."""
        return get_idx_path(path_prefix).is_file() and get_bin_path(path_prefix).is_file()

    def __len__(self) -> int:
        return len(self._index.lengths)

    @overload
    def __getitem__(self, idx: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, idx: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, idx: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(idx, slice):
            return [self.get(i) for i in range(*idx.indices(len(self)))]
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns `length` tokens of sequence `idx` from token `offset` on; up to its end if `length` is None.

        Raises:
            IndexError: there is no such sequence.
            DataError: the range exceeds the sequence, or the index points beyond the token file.
        """
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sequence {idx} of a corpus of {len(self)} sequences")
        total = int(self._index.lengths[idx])
        if length is None:
            length = total - offset
        if offset < 0 or length < 0 or offset + length > total:
            raise DataError(f"tokens [{offset}, {offset + length}) of sequence {idx}, which has {total} tokens")
        start = int(self._index.pointers[idx]) + offset * self.dtype.itemsize
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


class IndexedDatasetBuilder:
    """Writes a corpus under temporary names; :meth:`finalize` renames the complete files.

    Use it in a `with` statement, which removes unfinished files after an exception or an interrupt. An existing corpus
    of the same name stays readable until it is replaced.
    """

    def __init__(self, bin_path: str | os.PathLike[str], dtype: DTypeLike = np.int32) -> None:
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self._bin_path = Path(bin_path)
        # `add_document` and `add_index` append to these and to the draft of the .bin; `finalize` writes them.
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._temporary, self._file = _open_temporary(self._bin_path)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes the unfinished files; does nothing after :meth:`finalize`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add_document(self, tensor: ArrayLike, lengths: Sequence[int]) -> None:
        """Appends one document.

        Args:
            tensor: any array; the document's sequences, concatenated.
            lengths: tokens in each sequence.

        Raises:
            DataError: the lengths do not add up, or a token does not fit the dtype.
        """
        values = np.asarray(tensor)
        if sum(lengths) != values.size or min(lengths, default=0) < 0:
            raise DataError(f"a document of {values.size} tokens was given sequence lengths {list(lengths)}")
        if max(lengths, default=0) > np.iinfo(np.int32).max:
            raise DataError(f"a sequence of {max(lengths)} tokens; the format holds lengths below 2^31, split it")
        self._file.write(_cast(values, self.dtype).tobytes())
        self._lengths.extend(lengths)
        self._document_indices.append(len(self._lengths))

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Appends all documents of another corpus, which must have the same dtype."""
        index = IndexFile(get_idx_path(path_prefix))
        bin_path = get_bin_path(path_prefix)
        if index.dtype != self.dtype:
            raise DataError(
                f"{get_idx_path(path_prefix)} holds {index.dtype.name} tokens and is to be merged into a corpus of "
                f"{self.dtype.name}; prepare both with the same tokenizer"
            )
        index.check_tokens(bin_path)
        first = len(self._lengths)
        self._lengths.frombytes(index.lengths.astype(np.int32).tobytes())
        self._document_indices.frombytes((index.document_indices[1:] + first).astype(np.int64).tobytes())
        with bin_path.open("rb") as source:
            shutil.copyfileobj(source, self._file, 1 << 22)

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Writes the index, then renames both files, the index last."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        documents = np.frombuffer(self._document_indices, np.int64)
        temporary, file = _open_temporary(Path(idx_path))
        try:
            with file:
                write_index(file, self.dtype, lengths, documents)
                file.flush()
                os.fsync(file.fileno())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            Path(idx_path).unlink(missing_ok=True)  # an old index must never be read with the new tokens
            self._temporary.replace(self._bin_path)
            temporary.replace(idx_path)
            sync_folder(self._bin_path.parent)
            sync_folder(Path(idx_path).parent)
        finally:
            temporary.unlink(missing_ok=True)


def _cast(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns `values` in `dtype`; raises if a token does not fit, where numpy would wrap it around to another one."""
    if values.size and dtype.kind in "iu" and values.dtype != dtype:
        limits = np.iinfo(dtype)
        low, high = values.min(), values.max()
        if values.dtype.kind not in "iu" or low < limits.min or high > limits.max:
            raise DataError(
                f"tokens from {low} to {high} ({values.dtype.name}) do not fit {dtype.name}; "
                "build with DType.optimal_dtype(vocab_size)"
            )
    return values.astype(dtype, copy=False)


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        _sweep(path)
        file = temporary.open("wb")
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # marks the draft as in use, for `_sweep`
        return temporary, file
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); create the folder, make it writable, or choose another"
        ) from None


def _sweep(path: Path) -> None:
    """Removes drafts of this file that killed programs left; a draft in use is locked."""
    if fcntl is None:
        return
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
