"""Reads boxes of the tensors of any checkpoint, in any layout and encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..format.index import CheckpointIndex, Piece
from ..format.reader import IndexedReader
from .safetensors_io import open_safetensors


class BoxReader:
    """Reads boxes of foreign tensors. A result may be a view of the file: do not write to it.

    Caches the last piece that it unpacked, and keeps files open for the boxes that follow.
    """

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self.index = index
        self.reader = IndexedReader(folder, index)
        # The piece that was unpacked last, and its tensor, which owns its memory. The next unpacked piece replaces it.
        self.last: tuple[Piece, torch.Tensor] | None = None
        # Open safetensors files by name; tensors read from them may be views of their pages. `close_files` clears it.
        self.files: dict[str, Any] = {}

    def close_files(self) -> None:
        """Closes all files: they are mapped, and pages that were read count as this process's memory while open."""
        self.files.clear()

    def read(self, name: str, box: tuple[slice | int, ...]) -> torch.Tensor:
        entry = self.index.tensors[name]
        ranges = [(part, part + 1) if isinstance(part, int) else (part.start, part.stop) for part in box]
        found = [piece for piece in entry.pieces if _meets(piece, ranges)]
        whole = torch.empty([stop - start for start, stop in ranges], dtype=entry.dtype) if len(found) > 1 else None
        for piece in found:
            common = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(ranges, piece.offsets, piece.sizes, strict=True)
            ]
            inside = tuple(slice(a - offset, b - offset) for (a, b), offset in zip(common, piece.offsets, strict=True))
            part = self._piece(name, piece)[inside]
            if whole is None:
                whole = part
            else:
                whole[
                    tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, ranges, strict=True))
                ] = part
        if whole is None:  # an index that has been checked covers every element
            raise CheckpointError(f"{name} has no element in {ranges}")
        return whole[tuple(0 if isinstance(part, int) else slice(None) for part in box)]

    def _piece(self, name: str, piece: Piece) -> Any:
        """Returns an object that reads a part of a piece when it is indexed."""
        if self.index.encoding == "safetensors":
            if piece.file not in self.files:
                self.files[piece.file] = open_safetensors(self.reader.folder / piece.file)
            return self.files[piece.file].get_slice(name)
        if self.index.encoding == "raw":
            return self.reader.read_piece(name, piece)  # mapped: reads only the pages that are used
        if self.last is None or self.last[0] is not piece:
            self.last = None
            self.last = piece, self.reader.read_piece(name, piece)
        return self.last[1]


def _meets(piece: Piece, ranges: list[tuple[int, int]]) -> bool:
    return all(
        start < offset + size and offset < stop
        for (start, stop), offset, size in zip(ranges, piece.offsets, piece.sizes, strict=True)
    )
