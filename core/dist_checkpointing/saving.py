"""Saves tensors of any layout, at once or in the background: one file of raw pieces per rank, one index for all.

A state is a flat mapping from names to tensors: plain tensors, which every rank that gives the name holds whole, and
DTensors, with a piece on each rank (:func:`global_view` makes them). Everything else is stored as JSON in
``metadata``. A value of one rank alone is a tensor with a name of its own (``rng.rank3``), given by that rank.

A piece is the row-major bytes of a box of a tensor and nothing else: reading it runs no code, and a rank that needs a
part of a piece reads only the pages of that part. Each piece begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import device
from ..base.errors import CheckpointError
from ..base.files import write_durably
from ..base.host_memory import host_pages, shared_bytes
from ..comm import streams
from ..comm.collectives import all_reduce_by_backend
from . import agreement
from .agreement import Key, Offer, Ranks
from .format import folders
from .format.content_hash import box_hash
from .format.index import INDEX_FILE, CheckpointIndex, Piece, TensorEntry, encode_index
from .format.reader import is_good


def save(
    sharded_state_dict: Mapping[str, Tensor],
    checkpoint_dir: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: folders.Retention | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint atomically: it is complete under its name, or not there at all.

    Replaces a checkpoint of that name, also atomically; refuses any other folder of that name. Once the checkpoint is
    complete, the file ``latest`` in the same folder names it. It stores a hash of each whole tensor, which does not
    depend on the layout. One process at a time writes in a folder, see `folders`. Collective over `process_group`.

    Args:
        sharded_state_dict: tensors by name, on any device. A tensor that several ranks hold is written by one of
            them, a buffer (of `model_state_dict`) by the first.
        checkpoint_dir: created with its parents. All ranks must see the same file system.
        metadata: text keys and JSON values; tuples become lists. The first rank's is written.
        keep: which older checkpoints ``iter_...`` in the same folder stay; None keeps all. Before one is removed, each
            rank reads back and compares what it wrote. If `metadata` says ``"finite": False``, or ``"skipped_steps"``
            above 0, the newest checkpoint that does not say so stays too.
        process_group: the ranks that write together; None means the default group, or this process alone.

    Raises:
        CheckpointError: on all ranks if any failed, also if another process writes in the folder. Earlier checkpoints
            are unchanged.
    """
    state, metadata = sharded_state_dict, {} if metadata is None else metadata
    ranks, folder = Ranks(process_group), folders.absolute_folder(checkpoint_dir)
    keys = agreement.planned_pieces(state, metadata, folder, ranks, agreement.spread)
    pieces = agreement.held_pieces(state)
    _Writer(folder, metadata, keep).write(agreement.offers(state), keys, [pieces[key] for key in keys], ranks)


def all_finite(state: Mapping[str, Tensor], ranks: Ranks) -> bool:
    """Returns whether no floating value of a state is infinite or NaN on any rank. Collective."""
    parts = [part for part in agreement.held_pieces(state).values() if part.is_floating_point()]
    ends = [end for part in parts if part.element_size() > 1 for end in torch.aminmax(part)]  # both are NaN if any is
    everywhere = torch.tensor(int(all(end.isfinite() for end in ends)), device=device.current_device())
    if ranks.size > 1:
        all_reduce_by_backend(everywhere, ranks.group, what="whether all values are finite", op=dist.ReduceOp.MIN)
    return bool(everywhere)


_GROUP_LIMIT = timedelta(hours=6)
"""How long ranks that have written wait for one that still writes. A rank that has ended is noticed at once."""


class AsyncSaver:
    """Writes one checkpoint at a time in the background, on a gloo group of its own. Collective over all ranks.

    Each rank copies its part of the checkpoint into host memory of the same size, which it keeps for the next one. A
    thread writes the copies as `save` does: the checkpoint is published atomically, and if a rank dies earlier, the
    last checkpoint stays. Which rank writes which piece is planned at the first checkpoint, and again after the layout
    of the state has changed on a rank. Call `wait` before the process group is destroyed.
    """

    def __init__(self) -> None:
        # The gloo group of the thread's collectives. The first `save` makes it; never cleared.
        self._group: dist.ProcessGroup | None = None
        # Owns the host copies that the thread writes. The next `save` overwrites them, after `wait`.
        self._staging = HostStaging()
        # What this rank held at the last plan, and the pieces that it writes of it; empty before. `_plan` sets both.
        self._last_offers: dict[str, Offer] = {}
        self._keys: list[Key] = []
        # The thread that writes the last checkpoint. `save` starts it, `wait` joins and clears it.
        self._thread: threading.Thread | None = None
        # The error of the last checkpoint on this rank. `save` or the thread sets it, `wait` raises and clears it.
        self._error: BaseException | None = None

    def save(
        self,
        state: Mapping[str, Tensor],
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any],
        keep: folders.Retention | None = None,
    ) -> None:
        """Begins a checkpoint, and returns when `state` may change. Takes the arguments of `save`.

        Waits first for the previous checkpoint. Errors of this one are raised by `wait`, on all ranks.

        Raises:
            CheckpointError: as `wait` does, for the previous checkpoint.
        """
        self.wait()
        if self._group is None and dist.is_available() and dist.is_initialized():
            device.set_backend_defaults()  # the maker of the default group may not have asked for it
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_LIMIT)
        ranks, folder = Ranks(self._group), folders.absolute_folder(directory)
        try:
            self._plan(state, metadata, folder, ranks)
            pieces = agreement.held_pieces(state)
            copies = self._staging.copy([pieces[key] for key in self._keys])
            writer = _Writer(folder, metadata, keep)
        except CheckpointError as error:
            self._error = error
            return
        self._thread = threading.Thread(target=self._write, args=(copies, writer, ranks), name="saving", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the checkpoint could not be written. Other ranks may learn it later."""
        return self._error is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until the checkpoint is written, or for `limit_s` seconds.

        Raises:
            CheckpointError: the checkpoint could not be written; raised once, on all ranks.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _plan(self, state: Mapping[str, Tensor], metadata: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
        """Plans the pieces of `state`, unless no rank's layout has changed since the last plan."""
        own_offers = {} if agreement.unsavable(state, metadata) else agreement.offers(state)
        is_known = torch.tensor(int(own_offers == self._last_offers != {}))
        if self._group is not None:
            all_reduce_by_backend(is_known, self._group, what="whether all ranks know", op=dist.ReduceOp.MIN)
        if not is_known:
            self._keys = agreement.planned_pieces(state, metadata, folder, ranks, agreement.spread)
            self._last_offers = own_offers

    def _write(self, copies: list[Tensor], writer: _Writer, ranks: Ranks) -> None:
        try:
            writer.write(self._last_offers, self._keys, copies, ranks)
        except BaseException as error:  # raised in the thread that asked for it
            self._error = error


class HostStaging:
    """Host memory for copies, allocated by the first checkpoint and reused by later ones.

    It is as large as this rank's part of a checkpoint, and pinned if copies come from a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        """Owns the copies of the last checkpoint. `copy` grows it, and overwrites it for the next one."""

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns contiguous copies on the host, complete when it returns. Overwrites those of the last call."""
        starts, end = agreement.aligned(tensor.nbytes for tensor in tensors)
        on_gpu = any(streams.is_asynchronous(tensor.device) for tensor in tensors)
        if len(self._memory) < end or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before the larger one is allocated
            self._memory = streams.pinned([end], torch.uint8) if on_gpu else host_pages(end)
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            copy = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=on_gpu))
        if on_gpu:
            streams.current_stream().synchronize()
        return copies


class _Writer:
    """Writes one checkpoint into a temporary folder, and renames it to `folder` when every rank's file is on disk.

    Args:
        metadata: copied at construction.
        keep: which older checkpoints stay when this one is complete; None keeps all.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any], keep: folders.Retention | None = None) -> None:
        self.folder = folder
        self.metadata = copy.deepcopy(dict(metadata))
        self.keep = keep

    def write(
        self, own_offers: Mapping[str, Offer], keys: Sequence[Key], tensors: Sequence[Tensor], ranks: Ranks
    ) -> None:
        """Writes the planned boxes of all ranks, and publishes the checkpoint. Collective.

        Args:
            own_offers: what this rank holds.
            keys: the boxes to write, a result of `planned_pieces`.
            tensors: their values.
        """
        doing, file = f"saving {self.folder}: ", f"rank_{ranks.rank:05d}.bin"
        with ExitStack() as of_first:
            ranks.from_first(lambda: of_first.enter_context(folders.being_written(self.folder)), doing)
            entries = ranks.on_all(lambda: self._write_file(file, own_offers, keys, tensors), doing)
            ranks.decided_by_first(entries, self._finish, doing)

    def _write_file(
        self, file: str, own_offers: Mapping[str, Offer], keys: Sequence[Key], tensors: Sequence[Tensor]
    ) -> dict[str, TensorEntry]:
        """Writes this rank's file. Returns its pieces of each tensor."""
        pieces, _ = agreement.place_pieces(own_offers, keys, file)
        if keys:
            path = folders.temporary_folder(self.folder) / file
            with path.open("xb") as stream:
                for number, ((name, box), tensor) in enumerate(zip(keys, tensors, strict=True)):
                    hash_value = box_hash(tensor, box.offsets, own_offers[name].shape)
                    pieces[number] = replace(pieces[number], hash=hash_value)
                    _write_piece(stream, tensor, pieces[number].start)
                stream.flush()
                os.fsync(stream.fileno())
            if self.keep is not None:  # older checkpoints are removed only if the new one can be read
                _check_written(path, pieces, tensors)
        return agreement.entries(own_offers, keys, pieces)

    def _finish(self, of_ranks: Sequence[Mapping[str, TensorEntry]]) -> list[None]:
        """Writes the index of all ranks' pieces, and publishes the folder."""
        tensors, file_bytes = agreement.join_entries(of_ranks)
        text = encode_index(CheckpointIndex(tensors, file_bytes, self.metadata))
        write_durably(folders.temporary_folder(self.folder) / INDEX_FILE, text)
        folders.publish(self.folder)
        if self.keep is not None:
            folders.prune(self.folder.parent, self.keep, is_good)
        return [None] * len(of_ranks)


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


def _write_piece(stream: BinaryIO, tensor: Tensor, start: int) -> None:
    stream.seek(start)
    stream.write(_bytes_of(tensor).data)


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the tensor's bytes in row-major order, on the host."""
    return shared_bytes(tensor.detach().cpu().contiguous())
