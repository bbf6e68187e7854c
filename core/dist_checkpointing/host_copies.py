"""Keeps copies of a run's state in host memory that outlives the process, to continue from after a lost rank.

    root/                                a folder of a file system in memory
      generation_00002/
        plan.json                        the index of what all ranks of the generation copy
        version_0/  rank_00000.bin       the bytes of a rank's pieces, as in a checkpoint
                    rank_00000.json      the step that they are of; absent while they are written
        version_1/  ...                  the step before

Each rank copies the pieces that it would write of a checkpoint: what several ranks hold, as parameters under DDP, is
copied once. Of the two versions one is complete on every rank at any moment, if ranks call `wait` between the start of
a copy and a collective of all ranks before the next one. A version that all ranks have completed is read as a
checkpoint, by any number of ranks in any layout. It has no hashes: it never leaves memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.files import write_durably
from .agreement import Ranks
from .format.index import INDEX_FILE, CheckpointIndex, Piece, TensorEntry, decode_index, encode_index
from .format.writer import ALIGNMENT_BYTES, held_pieces, is_of_first_rank, joined, offers
from .serialization import planned_pieces

_PLAN_FILE = "plan.json"
_RANKS = "ranks"


class HostCopies:
    """The copies of one generation of ranks. Made by all ranks together, with the first copy.

    Args:
        root: folder in memory that all ranks of this machine share, and that outlives them.
        generation: its number, larger than those before, whose copies are removed once this one's first is complete.
        tensors: as for `save`. Later copies are of tensors with these names and layouts.
        metadata: as for `save`.
        step: number of the step that the tensors are of.

    Raises:
        CheckpointError: on all ranks: the memory is too small.
    """

    def __init__(
        self, root: Path, generation: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int
    ) -> None:
        ranks = Ranks()
        self._folder = root / f"generation_{generation:05d}"
        self._name = f"rank_{ranks.rank:05d}"
        # Pieces that this rank copies; fixed.
        self._keys = planned_pieces(tensors, metadata, self._folder, ranks)
        entries, num_bytes = self._entries(tensors)
        # For both versions: views of the shared memory, a piece each. They stay mapped until this object is freed.
        self._copies = ranks.on_all(lambda: [self._allocate(version, entries, num_bytes) for version in (0, 1)])
        ranks.decided_by_first(entries, lambda of_ranks: self._write_plan(of_ranks, ranks.size))
        # Writes one copy at a time. The last one is under way until `wait`, which clears it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-copies")
        self._running: Future[None] | None = None
        # The version that the next copy overwrites: the older one.
        self._next = 0
        self.num_bytes = num_bytes
        """Bytes of one version on this rank."""
        self.start(tensors, metadata, step)
        self.wait()
        ranks.all_gather(None)
        if ranks.is_first:
            for folder in root.glob("generation_*"):
                if folder != self._folder:
                    shutil.rmtree(folder, ignore_errors=True)

    def start(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int) -> None:
        """Begins to copy. Call `wait` before a tensor changes, buffers excepted, which are copied at once."""
        self.wait()
        held = held_pieces({name: _at_once(tensor) for name, tensor in tensors.items()})
        values = [held[key] for key in self._keys]
        version, self._next = self._next, 1 - self._next
        mark = json.dumps({"step": step, "metadata": dict(metadata)})
        self._running = self._thread.submit(self._copy, version, values, mark)

    def wait(self) -> None:
        """Waits until this rank's part of the last copy is complete."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits for the last copy, and ends the thread. The copies stay."""
        self._thread.shutdown()

    def _copy(self, version: int, values: list[Tensor], mark: str) -> None:
        folder = self._folder / f"version_{version}"
        path = folder / f"{self._name}.json"
        path.unlink(missing_ok=True)
        for copy, value in zip(self._copies[version], values, strict=True):
            copy.copy_(value.detach())
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(mark)
        unfinished.rename(path)

    def _entries(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], int]:
        """Returns the places of this rank's pieces in its file, and the length of the file."""
        offered, end = offers(tensors), 0
        pieces: dict[str, list[Piece]] = {name: [] for name, offer in offered.items() if 0 in offer.shape}
        for name, box in self._keys:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + int(np.prod(box.sizes)) * offered[name].dtype.itemsize
            piece = Piece(box.offsets, box.sizes, f"{self._name}.bin", start, end - start)
            pieces.setdefault(name, []).append(piece)
        entries = {
            name: TensorEntry(offered[name].dtype, offered[name].shape, tuple(of_name))
            for name, of_name in pieces.items()
        }
        return entries, end

    def _allocate(self, version: int, entries: Mapping[str, TensorEntry], num_bytes: int) -> list[Tensor]:
        folder = self._folder / f"version_{version}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._name}.bin"
        if num_bytes == 0:
            return []
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a write to memory that is full ends the process
        except OSError as error:
            raise CheckpointError(
                f"{path}: no memory for {num_bytes} bytes of copies ({error.strerror}); enlarge the file system in "
                "memory, or use --on-lost-rank restart"
            ) from None
        memory = torch.from_numpy(np.memmap(path, np.uint8, mode="r+", shape=(num_bytes,)))
        places = {(name, (p.offsets, p.sizes)): (e, p) for name, e in entries.items() for p in e.pieces}
        copies = []
        for name, box in self._keys:
            entry, piece = places[name, (box.offsets, box.sizes)]
            copies.append(memory[piece.start : piece.start + piece.num_bytes].view(entry.dtype).view(piece.sizes))
        return copies

    def _write_plan(self, of_ranks: list[dict[str, TensorEntry]], num_ranks: int) -> list[None]:
        tensors, file_bytes = joined(of_ranks)
        text = encode_index(CheckpointIndex(tensors, file_bytes, {_RANKS: num_ranks}))
        write_durably(self._folder / _PLAN_FILE, text)
        return [None] * num_ranks


def newest_copy(root: Path) -> Path | None:
    """Returns the folder of the newest version that every rank of its generation has completed, or None.

    The folder is then readable as a checkpoint. One rank calls it, while no rank copies.
    """
    found: list[tuple[int, Path, CheckpointIndex]] = []
    for plan in sorted(root.glob(f"generation_*/{_PLAN_FILE}")):
        index = decode_index(plan.read_text())
        for folder in sorted(plan.parent.glob("version_*")):
            marks = [_mark(folder / f"rank_{rank:05d}.json") for rank in range(index.metadata[_RANKS])]
            steps = {mark["step"] for mark in marks}
            if len(steps) == 1 and None not in steps:
                metadata = marks[0]["metadata"]
                found.append((steps.pop(), folder, dataclasses.replace(index, metadata=metadata)))
    if not found:
        return None
    _, folder, index = max(found, key=lambda version: (version[0], version[1].parent.name))
    write_durably(folder / INDEX_FILE, encode_index(index))
    return folder


def _mark(path: Path) -> dict[str, Any]:
    with suppress(OSError):
        mark: dict[str, Any] = json.loads(path.read_text())
        return mark
    return {"step": None}


def _at_once(tensor: Tensor) -> Tensor:
    """Returns a copy of a buffer, which a forward may change, and any other tensor as it is."""
    return tensor.clone() if is_of_first_rank(tensor) else tensor
