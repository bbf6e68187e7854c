"""Reads a checkpoint: checks its index, and reads boxes of its tensors from the stored pieces that overlap them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.files import JSON_BYTES, BoundsError, read_file
from ...base.host_memory import shared_bytes
from ..global_view import held_boxes, overlap
from .index import INDEX_FILE, TORCH_INDEX_FILE, CheckpointIndex, Piece, decode_index

Slices = tuple[slice, ...]


class PieceReader:
    """Reads the pieces of a checked index. Holds at most one unpacked piece at a time."""

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self.folder = folder
        self.index = index
        self._last: tuple[Piece, Tensor] | None = None
        """The piece that was unpacked last, and its tensor. `piece_values` replaces it by the next one."""

    def fill(self, targets: Mapping[str, Tensor]) -> set[str]:
        """Fills this rank's part of each tensor. Returns the names of tensors that were saved in other pieces.

        Args:
            targets: tensors of the whole model by name, each in the index with this shape and dtype.
        """
        requests = []
        resharded_names = set()
        for name, target in targets.items():
            for offsets, values in held_boxes(target):
                for piece, inside, within in self.overlaps(name, offsets, values.shape):
                    requests.append((name, piece, values[inside], within))
                    if (piece.offsets, piece.sizes) != (offsets, tuple(values.shape)):
                        resharded_names.add(name)
        for name, piece, part, within in sorted(requests, key=lambda request: (request[1].file, request[1].start)):
            is_plain = part.device.type == "cpu" and part.is_contiguous() and type(part) is Tensor
            if self.index.encoding == "raw" and tuple(part.shape) == piece.sizes and is_plain:
                self._read_into(part, piece)
            else:
                part.copy_(self.piece_values(name, piece)[within])
        return resharded_names

    def files_of(self, targets: Mapping[str, Tensor]) -> set[str]:
        """Returns the files that `fill` reads for tensors. Tensors that the index lacks have none."""
        boxes = [(name, *box) for name in targets.keys() & self.index.tensors for box in held_boxes(targets[name])]
        return {piece.file for name, at, values in boxes for piece, _, _ in self.overlaps(name, at, values.shape)}

    def overlaps(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[Piece, Slices, Slices]]:
        """Yields the pieces that overlap a box of a tensor, each with the slices of both that they share."""
        for piece in self.index.tensors[name].pieces:
            if shared := overlap((tuple(offsets), tuple(sizes)), (piece.offsets, piece.sizes)):
                yield piece, *shared

    def _read_into(self, target: Tensor, piece: Piece) -> None:
        """Reads a whole piece straight into the memory of its target."""
        memory = shared_bytes(target).data
        with (self.folder / piece.file).open("rb") as stream:
            stream.seek(piece.start)
            if stream.readinto(memory) != len(memory):
                raise CheckpointError(f"{self.folder / piece.file} has become shorter while it was read")

    def piece_values(self, name: str, piece: Piece) -> Any:
        """Returns a stored piece of the tensor `name`, to read by indexing. Raw bytes are a mapped view of the file.

        Raises:
            CheckpointError: an archive of torch's holds no tensor, or one of another dtype or shape.
        """
        path, dtype = self.folder / piece.file, self.index.tensors[name].dtype
        if self.index.encoding == "raw":
            # Copy-on-write, so that torch gets the writable memory that it requires and the file does not change.
            data = np.memmap(path, np.uint8, mode="c", offset=piece.start, shape=(piece.num_bytes,))
            return torch.from_numpy(data).view(dtype).view(piece.sizes)
        if self._last is not None and self._last[0] is piece:
            return self._last[1]
        self._last = None  # free it before the next one is unpacked
        with path.open("rb") as stream:
            stream.seek(piece.start)
            archive = stream.read(piece.num_bytes)
        from .torch_files import read_tensor_archive  # of torch's checkpoints alone

        try:
            tensor = read_tensor_archive(archive)
        except CheckpointError as error:
            raise CheckpointError(f"{path} holds no readable tensor for {name!r}: {error}; nothing was run") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != piece.sizes:
            raise CheckpointError(
                f"{path} has another dtype or shape for {name!r} than {dtype} of shape {piece.sizes}, which the index "
                "gives; load another checkpoint"
            )
        self._last = piece, tensor
        return tensor


def read_index(folder: Path) -> CheckpointIndex:
    """Reads and checks the index of a complete checkpoint, ours or torch's, and the size of each file.

    Raises:
        CheckpointError: there is no checkpoint, the index is damaged or unsafe, or a file is missing or of another
            size.
    """
    path = next((folder / name for name in (INDEX_FILE, TORCH_INDEX_FILE) if (folder / name).is_file()), None)
    if path is None:
        reason = "it has no checkpoint.json" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a checkpoint: {reason}; name a folder that `save` wrote")
    try:
        if path.name == TORCH_INDEX_FILE:
            from .torch_files import read_torch_index  # a reader of pickles, which own checkpoints never load

            index = read_torch_index(path)
        else:
            index = decode_index(read_file(path, JSON_BYTES).decode("utf-8"))
    except (CheckpointError, BoundsError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or unsafe: {error}; use another checkpoint") from error
    for name, num_bytes in index.file_bytes.items():
        file = folder / name
        if file.is_symlink():
            raise CheckpointError(f"{file} is a link, and a checkpoint holds its own files; put a copy in its place")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; restore it, or use another checkpoint")
        found_bytes = file.stat().st_size
        if found_bytes < num_bytes or (found_bytes > num_bytes and index.encoding == "raw"):
            raise CheckpointError(
                f"{file} has {found_bytes} bytes where {num_bytes} were written; restore it, or use another checkpoint"
            )
    return index


FINITE, SKIPPED = "finite", "skipped_steps"
"""Entries of a checkpoint's metadata: whether all tensors are finite, and the number of steps in a row, up to the
save, that were skipped because a gradient was not finite."""


def is_good(folder: Path) -> bool:
    """Returns whether a run can continue from a checkpoint, by its description: finite weights, last step not
    skipped."""
    try:
        metadata = read_index(folder).metadata
    except CheckpointError:
        return False
    return metadata.get(FINITE, True) is not False and metadata.get(SKIPPED, 0) == 0
