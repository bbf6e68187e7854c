"""Where torch.distributed.checkpoint puts bytes and finds them: one file of raw pieces a rank, one index for all.

A piece is the row-major bytes of a box of a tensor and nothing else, so reading it cannot run anything, and a rank
that needs a part of a piece touches only the pages of that part. Each piece begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ...bounds import JSON_BYTES, BoundsError, read_file
from ...durable import write_durably
from ...errors import CheckpointError
from . import folders
from .content_hash import box_hash
from .folder_lock import acquire_folder, release_folder
from .index import CheckpointIndex, Piece, TensorEntry
from .safe_metadata import INDEX_FILE, TORCH_INDEX_FILE, decode_index, encode_index, read_torch_index
from .staging import HostStaging
from .tensor_archive import read_tensor_archive

_ALIGNMENT_BYTES = 64


class RawWriter(StorageWriter):
    """Writes beside `folder`, and gives it its name when every rank's file is on disk.

    The first rank makes the temporary folder before any plan is scattered, and publishes it after all results have
    been gathered; torch raises on all ranks what fails on one, so that no rank needs a barrier of its own.

    Args:
        metadata: is copied: what it was is what is written.
        keep: which older checkpoints stay when this one stands; None keeps all.
        staging: takes copies of what this rank writes before the first byte is written, so that the state may change
            from then on.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, Any],
        keep: folders.Retention | None = None,
        staging: HostStaging | None = None,
    ) -> None:
        self.folder = folder
        self.metadata = copy.deepcopy(dict(metadata))
        self.keep = keep
        self.staging = staging
        self.is_first = False
        self._locked: tuple[int, str] | None = None
        """The folder's lock, from the plan until `release`; on the first rank alone."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # one writer writes one checkpoint

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.is_first:
            self._locked = acquire_folder(self.folder.parent)
            folders.begin(self.folder)
        return plan

    def release(self, *, failed: bool) -> None:
        """Gives the folder's lock back; after a failure also removes what was written."""
        if self._locked is not None:
            if failed:
                folders.discard(self.folder)
            release_folder(self._locked)
            self._locked = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(p, storage_data=f"rank_{rank:05d}.bin") for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        items = [
            (item, item.tensor_data)
            for item in plan.items
            if item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes
        ]
        tensors = self._values([item for item, _ in items], planner)
        if items:
            path = folders.temporary_folder(self.folder) / plan.storage_data
            with path.open("wb") as stream:
                for (item, described), tensor in zip(items, tensors, strict=True):
                    offsets, whole = tuple(item.index.offset or ()), tuple(described.size)
                    hashed = box_hash(tensor, offsets, whole)
                    start, num_bytes = _append(stream, tensor)
                    piece = Piece(offsets, tuple(tensor.shape), plan.storage_data, start, num_bytes, hashed)
                    results.append(WriteResult(item.index, num_bytes, piece))
                stream.flush()
                os.fsync(stream.fileno())
            if self.keep is not None:  # nothing older is removed for one that cannot be read
                _check_written(path, [(result.storage_data, t) for result, t in zip(results, tensors, strict=True)])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _values(self, items: list[WriteItem], planner: SavePlanner) -> list[torch.Tensor]:
        if self.staging is None:
            return [_tensor_of(item, planner) for item in items]
        return self.staging.take([item.index for item in items], lambda i: _tensor_of(items[i], planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces: dict[str, list[Piece]] = {}
        file_bytes: dict[str, int] = {}
        for result in (result for of_rank in results for result in of_rank):
            piece = result.storage_data
            pieces.setdefault(result.index.fqn, []).append(piece)
            file_bytes[piece.file] = max(file_bytes.get(piece.file, 0), piece.start + piece.num_bytes)
        tensors = {
            name: TensorEntry(entry.properties.dtype, tuple(entry.size), tuple(pieces.get(name, ())))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if not tensors:
            raise CheckpointError("no rank gave a tensor to save")
        text = encode_index(CheckpointIndex(tensors, file_bytes, self.metadata))
        write_durably(folders.temporary_folder(self.folder) / INDEX_FILE, text)
        folders.publish(self.folder)
        if self.keep is not None:
            folders.prune(self.folder.parent, self.keep, is_good)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class IndexedReader(StorageReader):
    """Reads the pieces that a checked index describes, straight into the tensors that ask for them."""

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self.folder = folder
        self.index = index
        self.pieces: dict[MetadataIndex, Piece] = {}
        self.resharded: set[str] = set()
        """Tensors that this rank put together from other pieces than it holds; known once they are read."""

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
                stored = self._read(item.storage_index.fqn, piece)
                target.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
            else:
                self._read_into(target, piece)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_into(self, target: torch.Tensor, piece: Piece) -> None:
        """The whole piece straight into the memory that it belongs to."""
        memory = target.reshape(-1).view(torch.uint8).numpy().data
        with (self.folder / piece.file).open("rb", buffering=0) as stream:
            stream.seek(piece.start)
            done = 0
            while done < len(memory):
                count = stream.readinto(memory[done:])
                if not count:
                    raise CheckpointError(f"{self.folder / piece.file} has become shorter while it was read")
                done += count

    def _read(self, name: str, piece: Piece) -> torch.Tensor:
        path, dtype = self.folder / piece.file, self.index.tensors[name].dtype
        if self.index.encoding == "raw":
            # Copy-on-write, so that torch gets the writable memory that it insists on and the file stays as it is.
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
            raise CheckpointError(f"{path} holds for {name!r} something else than {dtype} of shape {piece.sizes}")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_index(folder: Path) -> CheckpointIndex:
    """The checked index of a complete checkpoint, ours or torch's, all of whose files have the size that it says.

    Raises:
        CheckpointError: no checkpoint, a damaged or unsafe index, a file that is missing or of another size.
    """
    path = folder / INDEX_FILE
    torch_path = folder / TORCH_INDEX_FILE
    if not path.is_file() and not torch_path.is_file():
        found = "it has no checkpoint.json" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a checkpoint: {found}; name a folder that `save` wrote")
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
"""Entries of a checkpoint's metadata: False where a tensor holds what is not finite; and how many steps in a row were
skipped, because a gradient was not finite, when it was saved."""


def is_good(folder: Path) -> bool:
    """Whether a run can go on from a checkpoint, by its description: finite weights, and a last step that was made."""
    try:
        metadata = read_index(folder).metadata
    except CheckpointError:
        return False
    return metadata.get(FINITE, True) is not False and metadata.get(SKIPPED, 0) == 0


def _check_written(path: Path, pieces: list[tuple[Piece, torch.Tensor]]) -> None:
    """Reads a file that was just written from the disk, where the system can be told to forget its copy."""
    with path.open("rb") as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for piece, tensor in pieces:
            data = np.fromfile(stream, np.uint8, piece.num_bytes, offset=piece.start - stream.tell())
            if len(data) != piece.num_bytes or not np.array_equal(data, _bytes_of(tensor)):
                end = piece.start + piece.num_bytes
                raise CheckpointError(
                    f"{path} does not read back as it was written, in bytes {piece.start} to {end}: the disk or the "
                    "memory fails; no older checkpoint was removed"
                )


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{item.index.fqn} is no tensor; put it into metadata")
    return tensor.detach()


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and type(tensor) is torch.Tensor


def _append(stream: io.BufferedWriter, tensor: torch.Tensor) -> tuple[int, int]:
    """Where the tensor's bytes begin in the file, and how many they are."""
    start = -(-stream.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    stream.seek(start)
    data = _bytes_of(tensor)
    stream.write(data.data)
    return start, data.nbytes


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in row-major order, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
