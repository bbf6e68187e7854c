"""Writes a checkpoint: one file of raw pieces per rank, one index for all. Decides which rank writes which piece.

A piece is the row-major bytes of a box of a tensor and nothing else: reading it runs no code, and a rank that needs a
part of a piece reads only the pages of that part. Each piece begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.files import write_durably
from ..flat_range import held_boxes, is_copy
from . import folders
from .content_hash import box_hash
from .index import INDEX_FILE, Box, CheckpointIndex, Piece, TensorEntry, encode_index
from .reader import is_good

_MARK = "written_by_first_rank"

Key = tuple[str, Box]
"""A tensor's name, and a box of it that one rank writes as one piece."""


def of_first_rank(tensor: Tensor) -> Tensor:
    """Returns a view whose values `spread` takes from the first rank that holds them."""
    view = tensor.detach()
    setattr(view, _MARK, True)
    return view


def is_of_first_rank(tensor: Tensor) -> bool:
    """Returns whether `of_first_rank` made a view: its values may differ on other ranks."""
    return getattr(tensor, _MARK, False)


@dataclass(frozen=True)
class Offer:
    """The part of a tensor that a rank can write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[Box, ...]
    of_first_rank: bool
    """Whether ranks that hold the same box may differ, as in a buffer: then the first of them writes it."""


def held_pieces(state: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Returns views of all boxes that this rank holds of the tensors in `state`."""
    return {
        (name, Box(offsets, tuple(values.shape))): values
        for name, tensor in state.items()
        if not is_copy(tensor)
        for offsets, values in held_boxes(tensor)
        if values.numel()
    }


def offers(state: Mapping[str, Tensor]) -> dict[str, Offer]:
    """Returns what this rank can write of each tensor."""
    boxes: dict[str, list[Box]] = {name: [] for name in state}
    for name, box in held_pieces(state):
        boxes[name].append(box)
    return {
        name: Offer(tensor.dtype, tuple(tensor.shape), tuple(boxes[name]), is_of_first_rank(tensor))
        for name, tensor in state.items()
    }


def spread(of_ranks: Sequence[Mapping[str, Offer]]) -> list[list[Key]]:
    """Returns the boxes that each rank writes. What several ranks hold goes to the one with the fewest bytes.

    Raises:
        CheckpointError: there is no tensor.
    """
    if not any(of_ranks):
        raise CheckpointError("no rank gave a tensor to save")
    holders: dict[Key, list[int]] = {}
    for rank, offered in enumerate(of_ranks):
        for name, offer in offered.items():
            for box in offer.boxes:
                holders.setdefault((name, box), []).append(rank)
    planned: list[list[Key]] = [[] for _ in of_ranks]
    num_bytes = [0] * len(of_ranks)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        offer = of_ranks[ranks[0]][name]
        writer = ranks[0] if offer.of_first_rank else min(ranks, key=num_bytes.__getitem__)
        planned[writer].append((name, box))
        num_bytes[writer] += math.prod(box.sizes) * offer.dtype.itemsize
    return planned


ALIGNMENT_BYTES = 64
"""Each piece begins at a multiple of it in its file."""


def joined(of_ranks: Sequence[Mapping[str, TensorEntry]]) -> tuple[dict[str, TensorEntry], dict[str, int]]:
    """Returns each tensor with the pieces of all ranks, and the bytes of each file."""
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    for name, entry in (named for of_rank in of_ranks for named in of_rank.items()):
        earlier = tensors[name].pieces if name in tensors else ()
        tensors[name] = dataclasses.replace(entry, pieces=earlier + entry.pieces)
        for piece in entry.pieces:
            file_bytes[piece.file] = max(file_bytes.get(piece.file, 0), piece.start + piece.num_bytes)
    return tensors, file_bytes


class RawWriter:
    """Writes a temporary folder, and renames it to `folder` when every rank's file is on disk.

    In this order: the first rank calls `begin`, every rank `write`, the first rank `finish`, every rank `release`.

    Args:
        metadata: copied at construction.
        keep: which older checkpoints stay when this one is complete; None keeps all.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any], keep: folders.Retention | None = None) -> None:
        self.folder = folder
        self.metadata = copy.deepcopy(dict(metadata))
        self.keep = keep
        self._locked: tuple[int, str] | None = None
        """Key of the folder's lock on the first rank, from `begin` until `release`. None on other ranks."""

    def begin(self) -> None:
        """Locks the folder that checkpoints are in, and makes the temporary one."""
        self._locked = folders.acquire_folder(self.folder.parent)
        folders.begin(self.folder)

    def write(
        self, file: str, offered: Mapping[str, Offer], keys: Sequence[Key], tensors: Sequence[Tensor]
    ) -> dict[str, TensorEntry]:
        """Writes this rank's file. Returns its pieces of each tensor. A tensor without elements has none.

        Args:
            offered: what this rank holds.
            keys: the boxes to write.
            tensors: their values.
        """
        pieces: dict[str, list[Piece]] = {name: [] for name, offer in offered.items() if 0 in offer.shape}
        written: list[Piece] = []
        if keys:
            path = folders.temporary_folder(self.folder) / file
            with path.open("wb") as stream:
                for (name, box), tensor in zip(keys, tensors, strict=True):
                    hashed = box_hash(tensor, box.offsets, offered[name].shape)
                    start, num_bytes = _append(stream, tensor)
                    written.append(Piece(box.offsets, box.sizes, file, start, num_bytes, hashed))
                    pieces.setdefault(name, []).append(written[-1])
                stream.flush()
                os.fsync(stream.fileno())
            if self.keep is not None:  # older checkpoints are removed only if the new one can be read
                _check_written(path, written, tensors)
        return {
            name: TensorEntry(offered[name].dtype, offered[name].shape, tuple(of_name))
            for name, of_name in pieces.items()
        }

    def finish(self, of_ranks: Sequence[Mapping[str, TensorEntry]]) -> list[Path]:
        """Writes the index of all ranks' pieces, and publishes the folder, which it returns for each rank."""
        tensors, file_bytes = joined(of_ranks)
        text = encode_index(CheckpointIndex(tensors, file_bytes, self.metadata))
        write_durably(folders.temporary_folder(self.folder) / INDEX_FILE, text)
        folders.publish(self.folder)
        if self.keep is not None:
            folders.prune(self.folder.parent, self.keep, is_good)
        return [self.folder] * len(of_ranks)

    def release(self, *, failed: bool) -> None:
        """Releases the folder's lock. After a failure also removes the unfinished checkpoint."""
        if self._locked is not None:
            if failed:
                folders.discard(self.folder)
            folders.release_folder(self._locked)
            self._locked = None


def _check_written(path: Path, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> None:
    """Compares a file with the tensors written to it. Reads from disk if the system can drop its cached pages."""
    with path.open("rb") as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece, tensor in zip(pieces, tensors, strict=True):
            data = np.fromfile(stream, np.uint8, piece.num_bytes, offset=piece.start - stream.tell())
            if len(data) != piece.num_bytes or not np.array_equal(data, _bytes_of(tensor)):
                end = piece.start + piece.num_bytes
                raise CheckpointError(
                    f"{path} does not read back as it was written, in bytes {piece.start} to {end}: the disk or the "
                    "memory fails; no older checkpoint was removed"
                )


def _append(stream: io.BufferedWriter, tensor: Tensor) -> tuple[int, int]:
    """Appends the tensor's bytes. Returns their start in the file and their number."""
    start = -(-stream.tell() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    stream.seek(start)
    data = _bytes_of(tensor)
    stream.write(data.data)
    return start, data.nbytes


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the tensor's bytes in row-major order, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
