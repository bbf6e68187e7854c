"""Reads a checkpoint for torch.distributed.checkpoint: checks its index, and reads the pieces in it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...errors import CheckpointError
from ...files import JSON_BYTES, BoundsError, read_file
from .index import INDEX_FILE, TORCH_INDEX_FILE, CheckpointIndex, Piece, decode_index
from .torch_files import read_tensor_archive, read_torch_index


class IndexedReader(StorageReader):
    """Reads the pieces of a checked index straight into the target tensors."""

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self.folder = folder
        self.index = index
        self.pieces: dict[MetadataIndex, Piece] = {}
        """Pieces by their index in torch's metadata; `set_up_storage_reader` fills it."""
        self.resharded: set[str] = set()
        """Tensors that this rank assembled from pieces of another layout. `read_data` adds; complete once it
        returns."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # one reader reads one checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index.as_torch()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.pieces = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests = [(self.pieces[item.storage_index], item) for item in plan.items]
        sources = Counter(item.dest_index for item in plan.items)
        for piece, item in sorted(requests, key=lambda request: (request[0].file, request[0].start)):
            target = planner.resolve_tensor(item).detach()
            if tuple(item.lengths) != piece.sizes or sources[item.dest_index] > 1:
                self.resharded.add(item.storage_index.fqn)
            if tuple(item.lengths) != piece.sizes or self.index.encoding != "raw" or not _is_plain_memory(target):
                stored = self.read_piece(item.storage_index.fqn, piece)
                target.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
            else:
                self._read_into(target, piece)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_into(self, target: torch.Tensor, piece: Piece) -> None:
        """Reads a whole piece straight into the memory of its target."""
        memory = target.reshape(-1).view(torch.uint8).numpy().data
        with (self.folder / piece.file).open("rb", buffering=0) as stream:
            stream.seek(piece.start)
            done = 0
            while done < len(memory):
                count = stream.readinto(memory[done:])
                if not count:
                    raise CheckpointError(f"{self.folder / piece.file} has become shorter while it was read")
                done += count

    def read_piece(self, name: str, piece: Piece) -> torch.Tensor:
        """Reads one stored piece of the tensor `name`. For raw bytes, maps a view of the file.

        Raises:
            CheckpointError: an archive of torch's holds no tensor, or one of another dtype or shape.
        """
        path, dtype = self.folder / piece.file, self.index.tensors[name].dtype
        if self.index.encoding == "raw":
            # Copy-on-write, so that torch gets the writable memory that it requires and the file does not change.
            mapped = np.memmap(path, np.uint8, mode="c", offset=piece.start, shape=(piece.num_bytes,))
            return torch.from_numpy(mapped).view(dtype).view(piece.sizes)
        with path.open("rb") as stream:
            stream.seek(piece.start)
            archive = stream.read(piece.num_bytes)
        try:
            tensor = read_tensor_archive(archive)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} holds no readable tensor for {name!r}: {error}; nothing in it was run"
            ) from error
        if tensor.dtype != dtype or tuple(tensor.shape) != piece.sizes:
            raise CheckpointError(
                f"{path} has another dtype or shape for {name!r} than {dtype} of shape {piece.sizes}, which the index "
                "gives; load another checkpoint"
            )
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_index(folder: Path) -> CheckpointIndex:
    """Reads and checks the index of a complete checkpoint, ours or torch's, and the size of each file.

    Raises:
        CheckpointError: there is no checkpoint, the index is damaged or unsafe, or a file is missing or of another
            size.
    """
    path = folder / INDEX_FILE
    torch_path = folder / TORCH_INDEX_FILE
    if not path.is_file() and not torch_path.is_file():
        reason = "it has no checkpoint.json" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a checkpoint: {reason}; name a folder that `save` wrote")
    try:
        if path.is_file():
            index = decode_index(read_file(path, JSON_BYTES).decode("utf-8"))
        else:
            path = torch_path
            index = read_torch_index(path)
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
"""Entries of a checkpoint's metadata: whether all tensors are finite; and the number of steps in a row, up to the
save, that were skipped because a gradient was not finite."""


def is_good(folder: Path) -> bool:
    """Returns whether a run can continue from a checkpoint, by its description: finite weights, last step not
    skipped."""
    try:
        metadata = read_index(folder).metadata
    except CheckpointError:
        return False
    return metadata.get(FINITE, True) is not False and metadata.get(SKIPPED, 0) == 0


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and type(tensor) is torch.Tensor
