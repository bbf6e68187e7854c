"""Compares loaded tensors and files on disk with the hashes in the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.text import listed, readable_bytes
from ..agreement import Ranks
from ..flat_range import held_boxes, is_copy
from .content_hash import MODULUS, box_hash
from .folders import complete_checkpoints, iteration_of
from .index import Box, CheckpointIndex, Piece, overlap
from .reader import PieceReader, is_good, read_index

BoxHash = tuple[Box, int]


def differing_tensors(state: Mapping[str, Tensor], index: CheckpointIndex, names: set[str], ranks: Ranks) -> list[str]:
    """Returns which of the loaded tensors in `names` differ from the saved ones, over all ranks. Collective.

    Args:
        state: this rank's part of the loaded tensors.
        names: tensors with hashes in the index; the same on all ranks.
    """
    held = {name: _box_hashes(state[name]) for name in sorted(names & state.keys())}

    def compare(of_ranks: list[dict[str, list[BoxHash]]]) -> list[list[str]]:
        differing = [
            name
            for name in sorted(names)
            if _differs([box for of_rank in of_ranks for box in of_rank.get(name, [])], index, name)
        ]
        return [differing] * len(of_ranks)

    return ranks.decided_by_first(held, compare)


def held_hashes(state: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Returns the hash of each whole tensor, as a checkpoint of `state` would store it. Collective.

    Args:
        state: this rank's part of the tensors. What several ranks hold counts once.
    """
    addends: dict[str, dict[Box, int]] = {}
    for of_rank in ranks.all_gather({name: _box_hashes(tensor) for name, tensor in state.items()}):
        for name, boxes in of_rank.items():
            addends.setdefault(name, {}).update(boxes)
    return {name: sum(boxes.values()) % MODULUS for name, boxes in addends.items()}


def damage(folder: Path, ranks: Ranks) -> list[str]:
    """Lists the damaged files of a checkpoint, with the tensors in them, or nothing if there are none. Collective.

    Ranks share the files and read every byte. Without hashes only the lengths of files are checked.
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
    reader = PieceReader(folder, index)
    bad = ranks.on_all(lambda: [(name, piece) for name, piece in mine if _is_damaged(reader, name, piece)])
    files: dict[str, list[str]] = {}
    for name, piece in (damaged_piece for of_rank in ranks.all_gather(bad) for damaged_piece in of_rank):
        files.setdefault(piece.file, []).append(f"{name} (bytes {piece.start} to {piece.start + piece.num_bytes})")
    return [f"{folder / file} is damaged in {listed(places, 5, ', ')}" for file, places in sorted(files.items())]


def verified_line(folder: Path, index: CheckpointIndex, names: set[str], seconds: float) -> str:
    """Says which tensors of a checkpoint were compared with their hashes, and how long that took."""
    num_bytes = sum(piece.num_bytes for name in names for piece in index.tensors[name].pieces)
    return f"verified {len(names)} tensors of {folder} by their hashes: {readable_bytes(num_bytes)} in {seconds:.2f} s"


def newest_good(root: Path, ranks: Ranks, *, excluded: Path | None = None) -> Path | None:
    """Returns the newest undamaged checkpoint that a run can continue from, or None if there is none. Collective.

    Args:
        excluded: a checkpoint that is not considered; older ones are tried first, then newer ones.
    """
    paths = ranks.from_first(lambda: [path for path in complete_checkpoints(root) if path != excluded])
    if excluded is not None:
        paths.sort(key=lambda path: iteration_of(path) > iteration_of(excluded))
    for path in paths:
        if ranks.from_first(partial(is_good, path)) and not damage(path, ranks):
            return path
    return None


@contextmanager
def another_offered(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Adds to errors of a checkpoint with damaged files the newest undamaged one to load instead. Collective."""
    try:
        yield
    except CheckpointError as error:
        if folder.parent == folder or not damage(folder, ranks):
            raise
        raise CheckpointError(f"{error}; {advice(folder, ranks)}") from None


def advice(folder: Path, ranks: Ranks) -> str:
    """Says which checkpoint to load instead of `folder`. Collective."""
    whole = newest_good(folder.parent, ranks, excluded=folder)
    if whole is None:
        return f"no other checkpoint in {folder.parent} is whole"
    return f"{whole.name} in the same folder is whole: continue from it with --load {whole}"


def _is_damaged(reader: PieceReader, name: str, piece: Piece) -> bool:
    try:
        values = reader.stored(name, piece)
    except (OSError, ValueError):  # removed, or cut short, since its length was compared
        return True
    return box_hash(values, piece.offsets, reader.index.tensors[name].shape) != piece.hash


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
        return False  # boxes that overlap, or cover only a part of the tensor: their sum is not comparable
    return sum(hashes.values()) % MODULUS != entry.content_hash


def _box_hashes(tensor: Tensor) -> list[BoxHash]:
    """Returns the boxes of the whole tensor that this rank holds, each with its addend to the hash."""
    shape = tuple(tensor.shape)
    if is_copy(tensor):
        return []
    return [
        (Box(offsets, tuple(values.shape)), box_hash(values, offsets, shape))
        for offsets, values in held_boxes(tensor)
        if values.numel()
    ]
