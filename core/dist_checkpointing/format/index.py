"""The index of a checkpoint: its tensors, the bytes of each piece, and the size of each file.

The index is all that is trusted about a checkpoint before its files are read, so every entry is checked: file names
stay inside the folder, pieces are inside their file and their tensor, and pieces cover a tensor exactly once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...errors import CheckpointError
from ...files.bounds import brief
from .content_hash import MODULUS

Encoding = Literal["raw", "torch.save", "safetensors"]
"""How pieces are stored: raw bytes in row-major order; archives of ``torch.save``, by torch's own writer; or whole
tensors in safetensors files, found by name."""

_MAX_DIMS = 64
"""The limit of torch and numpy."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is an interval in every dimension."""

    offsets: tuple[int, ...]
    """First index of the box, per dimension of the whole tensor."""
    sizes: tuple[int, ...]
    """Extent of the box per dimension; none is 0."""


@dataclass(frozen=True)
class Piece(Box):
    """A box of a tensor, stored in one run of bytes."""

    file: str
    """Name of a file in the checkpoint's folder."""
    start: int
    """Bytes from the beginning of the file; 0 in a safetensors file."""
    num_bytes: int
    hash: int | None = None
    """Addend of the box to the hash of the whole tensor (`content_hash`); None if the writer stored none."""


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor and its pieces; a tensor without elements has none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def content_hash(self) -> int | None:
        """The hash of the whole tensor, which does not depend on its pieces; None if a piece has no hash."""
        hashes = [piece.hash for piece in self.pieces if piece.hash is not None]
        return sum(hashes) % MODULUS if len(hashes) == len(self.pieces) else None


@dataclass(frozen=True)
class CheckpointIndex:
    """A checked description of a checkpoint."""

    tensors: dict[str, TensorEntry]
    file_bytes: dict[str, int]
    """Bytes of each file; a lower bound if pieces are archives."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata given to ``save``."""
    encoding: Encoding = "raw"
    others: frozenset[str] = frozenset()
    """Entries that are not tensors, which only torch's own writer makes; they are never read."""

    def check(self) -> None:
        """Raises CheckpointError on the first entry that contradicts another."""
        for name, size in self.file_bytes.items():
            _require(_FILE_NAME.fullmatch(name) is not None, f"{brief(name)} is no name of a file in the folder")
            _require(size >= 0, f"file {brief(name)} has the size {size}")
        for name, entry in self.tensors.items():
            self._check_tensor(name, entry)

    def _check_tensor(self, name: str, entry: TensorEntry) -> None:
        where = f"tensor {brief(name)} of shape {brief(list(entry.shape))}"
        _require(len(entry.shape) <= _MAX_DIMS, f"{where} has more than {_MAX_DIMS} dimensions")
        _require(all(size >= 0 for size in entry.shape), f"{where} has a negative dimension")
        volume = 0
        for piece in entry.pieces:
            _require(len(piece.offsets) == len(piece.sizes) == len(entry.shape), f"{where} has a piece of other rank")
            inside = all(
                offset >= 0 and size > 0 and offset + size <= whole
                for offset, size, whole in zip(piece.offsets, piece.sizes, entry.shape, strict=True)
            )
            _require(inside, f"{where} has a piece at {list(piece.offsets)} of size {list(piece.sizes)} outside of it")
            _require(piece.file in self.file_bytes, f"{where} names the unlisted file {brief(piece.file)}")
            in_file = piece.start >= 0 and piece.num_bytes > 0
            in_file = in_file and piece.start + piece.num_bytes <= self.file_bytes[piece.file]
            _require(in_file, f"{where} has a piece beyond the end of {brief(piece.file)}")
            elements = math.prod(piece.sizes)
            least = elements * entry.dtype.itemsize
            _require(
                piece.num_bytes >= least, f"{where} has a piece of {elements} elements in {piece.num_bytes} bytes"
            )
            if self.encoding != "torch.save":
                fits = piece.num_bytes == least
                _require(fits, f"{where} has a piece of {elements} elements in {piece.num_bytes} bytes")
                _require(piece.start % entry.dtype.itemsize == 0, f"{where} has a piece at the odd byte {piece.start}")
            volume += elements
        covered = volume == math.prod(entry.shape) and not overlap(entry.pieces)
        _require(covered, f"{where} is not covered exactly once by its {len(entry.pieces)} pieces")

    def as_torch(self) -> Metadata:
        """Returns the index for torch's load planner; ``storage_data`` maps each piece's index to its
        :class:`Piece`."""
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, Piece] = {}
        for name, entry in self.tensors.items():
            chunks = []
            for number, piece in enumerate(entry.pieces):
                chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
                storage[MetadataIndex(name, piece.offsets, number)] = piece
            tensors[name] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)
        return Metadata(tensors, storage_data=storage)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise CheckpointError(problem)


def overlap(pieces: Sequence[Box]) -> bool:
    """Returns whether two boxes share an element: sweeps along the dimension that separates most of them."""
    if len(pieces) < 2:
        return False
    num_dims = len(pieces[0].offsets)
    if num_dims == 0:
        return True
    axis = max(range(num_dims), key=lambda dim: len({piece.offsets[dim] for piece in pieces}))
    active: list[Box] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[axis]):
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > piece.offsets[axis]]
        if any(_boxes_meet(piece, other) for other in active):
            return True
        active.append(piece)
    return False


def _boxes_meet(one: Box, other: Box) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
