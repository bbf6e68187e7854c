"""Writes corpora in Megatron-LM's format, byte for byte as Megatron-LM does for the same tokens."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from shardstack.base.errors import DataError
from shardstack.base.files import sync_folder
from shardstack.datasets.indexed_dataset import HEADER, MAGIC, VERSION, DType, IndexFile, get_bin_path, get_idx_path

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]


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
    file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(document_indices)))
    for values, stored in ((lengths, "<i4"), (pointers, "<i8"), (document_indices, "<i8")):
        file.write(values.astype(stored, copy=False).tobytes())
