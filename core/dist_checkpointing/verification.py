"""Finds out whether what was loaded, or what lies on disk, is what was saved, by the hashes in the index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .content_hash import MODULUS, box_hash
from .flat_range import held_boxes
from .index import Box, CheckpointIndex, Piece, overlap
from .ranks import Ranks
from .storage import read_index

BoxHash = tuple[Box, int]


def differing_tensors(state: Mapping[str, Tensor], index: CheckpointIndex, names: set[str], ranks: Ranks) -> list[str]:
    """Which of the tensors in `names`, as all ranks together hold them, are not what was saved; collective.

    Args:
        state: this rank's part of what was loaded.
        names: the same on all ranks, each with hashes in the index.
    """
    held = {name: _box_hashes(state[name]) for name in sorted(names & state.keys())}

    def compare(of_ranks: list[dict[str, list[BoxHash]]]) -> list[str]:
        return [
            name
            for name in sorted(names)
            if _differs([box for of_rank in of_ranks for box in of_rank.get(name, [])], index, name)
        ]

    return ranks.decided_by_first(held, compare)


def damage(folder: Path, ranks: Ranks) -> list[str]:
    """What is wrong with the files of a checkpoint, each named; empty if all is what was written. Collective.

    Every byte is read, by the ranks in turns. Of a checkpoint without hashes only the lengths of files are checked.
    """
    try:
        index = ranks.from_first(lambda: read_index(folder))
    except CheckpointError as error:
        return [str(error)]
    pieces = [
        (name, piece) for name, entry in index.tensors.items() for piece in entry.pieces if piece.hash is not None
    ]
    pieces.sort(key=lambda named: (named[1].file, named[1].start))
    mine = pieces[ranks.rank * len(pieces) // ranks.size : (ranks.rank + 1) * len(pieces) // ranks.size]
    bad = ranks.on_all(lambda: [(p.file, name) for name, p in mine if _stored_hash(folder, index, name, p) != p.hash])
    files: dict[str, list[str]] = {}
    for file, name in (found for of_rank in ranks.all_gather(bad) for found in of_rank):
        files.setdefault(file, []).append(name)
    return [f"{folder / file} is damaged where {_listed(names)} lies" for file, names in sorted(files.items())]


def _stored_hash(folder: Path, index: CheckpointIndex, name: str, piece: Piece) -> int:
    entry = index.tensors[name]
    data = np.memmap(folder / piece.file, np.uint8, mode="c", offset=piece.start, shape=(piece.num_bytes,))
    return box_hash(torch.from_numpy(data).view(entry.dtype).view(piece.sizes), piece.offsets, entry.shape)


def _differs(held: list[BoxHash], index: CheckpointIndex, name: str) -> bool:
    entry = index.tensors[name]
    whole = Box((0,) * len(entry.shape), entry.shape)
    hashes: dict[Box, int] = {}
    for box, value in held:
        if hashes.setdefault(box, value) != value:
            return True  # replicas that are not equal
    if whole in hashes and hashes.pop(whole) != entry.content_hash:
        return True
    volume = sum(torch.Size(box.sizes).numel() for box in hashes)
    if volume != torch.Size(entry.shape).numel() or overlap(list(hashes)):
        return False  # parts of a tensor, or parts that overlap, that some caller asked for: there is nothing to sum
    return sum(hashes.values()) % MODULUS != entry.content_hash


def _box_hashes(tensor: Tensor) -> list[BoxHash]:
    """The boxes of the whole tensor that this rank holds, each with what it adds to the hash."""
    shape = tuple(tensor.shape)
    return [
        (Box(offsets, tuple(values.shape)), box_hash(values, offsets, shape))
        for offsets, values in held_boxes(tensor)
        if values.numel()
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
