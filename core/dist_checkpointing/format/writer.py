"""Writes a checkpoint for torch.distributed.checkpoint: one file of raw pieces per rank, one index for all.

A piece is the row-major bytes of a box of a tensor and nothing else: reading it runs no code, and a rank that needs a
part of a piece reads only the pages of that part. Each piece begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...errors import CheckpointError
from ...files import write_durably
from . import folders
from .content_hash import box_hash
from .folders import acquire_folder, release_folder
from .index import INDEX_FILE, CheckpointIndex, Piece, TensorEntry, encode_index
from .reader import is_good

_MARK = "written_by_first_rank"


def of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view whose values `SpreadPlanner` takes from the first rank that holds them."""
    view = tensor.detach()
    setattr(view, _MARK, True)
    return view


def is_of_first_rank(tensor: torch.Tensor) -> bool:
    """Returns whether `of_first_rank` made a view: its values may differ on other ranks."""
    return getattr(tensor, _MARK, False)


class SpreadPlanner(DefaultSavePlanner):
    """Spreads what replicas hold over the ranks that write, all but buffers, which may differ: they are the first
    rank's.

    Args:
        state: tensors by name; those of `of_first_rank` are buffers.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._buffers = {name for name, tensor in state.items() if is_of_first_rank(tensor)}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in written]
            written |= {item.index for item in items if item.index.fqn in self._buffers}
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


_ALIGNMENT_BYTES = 64


class Staging(Protocol):
    """Host memory for copies of tensors (`async_save.HostStaging`)."""

    def take(self, indices: Sequence[MetadataIndex], resolve: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous host copies of the pieces `indices`. `resolve` returns the piece at a position."""


class RawWriter(StorageWriter):
    """Writes a temporary folder, and renames it to `folder` when every rank's file is on disk.

    The first rank makes the temporary folder before plans are scattered, and publishes it after all results are
    gathered. Torch raises an error of one rank on all ranks, so that no barrier is needed.

    Args:
        metadata: copied at construction.
        keep: which older checkpoints stay when this one is complete; None keeps all.
        staging: copies this rank's tensors before the first byte is written; the state may change from then on.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, Any],
        keep: folders.Retention | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.folder = folder
        self.metadata = copy.deepcopy(dict(metadata))
        self.keep = keep
        self.staging = staging
        self.is_first = False
        """Whether this rank is the coordinator. `set_up_storage_writer` sets it; False before."""
        self._locked: tuple[int, str] | None = None
        """Key of the folder's lock on the first rank, from the plan until `release`; None on other ranks."""

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
        """Releases the folder's lock. After a failure also removes the unfinished checkpoint."""
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
            if self.keep is not None:  # older checkpoints are removed only if the new one can be read
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


def _check_written(path: Path, pieces: list[tuple[Piece, torch.Tensor]]) -> None:
    """Compares a file with the tensors written to it. Reads from disk if the system can drop its cached pages."""
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


def _append(stream: io.BufferedWriter, tensor: torch.Tensor) -> tuple[int, int]:
    """Appends the tensor's bytes. Returns their start in the file and their number."""
    start = -(-stream.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    stream.seek(start)
    data = _bytes_of(tensor)
    stream.write(data.data)
    return start, data.nbytes


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the tensor's bytes in row-major order, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
