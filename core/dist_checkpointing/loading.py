"""Loads tensors into any layout from one that any other has saved, and compares them and the files with their hashes.

The name and the shape of the whole tensor decide where values go; the layout that it was saved in does not matter.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.dtypes import dtype_name
from ..base.errors import CheckpointError
from ..base.text import join_parts, readable_bytes
from .agreement import Ranks, held_parts, refuse, tensor_problem
from .format import folders
from .format.content_hash import MODULUS, box_hash
from .format.index import Box, CheckpointIndex, Piece, share_elements
from .format.reader import PieceReader, read_index
from .global_view import FlatRange, can_be_cast
from .model_state import ShardedStateDict

BoxHash = tuple[Box, int]


def load(
    sharded_state_dict: Mapping[str, Tensor],
    checkpoint_dir: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    cast: bool = False,
    report: Callable[[str], None] | None = None,
    optional: str | tuple[str, ...] = (),
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fills the tensors of `sharded_state_dict` in place from a checkpoint that any layout and world size wrote.

    Checks names, shapes, dtypes and files on all ranks before the first value is written, and compares loaded tensors
    with the saved hashes. Also reads checkpoints of ``torch.distributed.checkpoint.save``, which have no hashes,
    unpickling nothing but tensors. Collective.

    Args:
        sharded_state_dict: plain tensors, DTensors and parameters by name.
        strict: every name given must be in the checkpoint, and every name of the checkpoint be given by some rank.
            If False, the names in common are loaded; there must be at least one.
        verify: if False, compare only tensors that are assembled from other pieces than they were saved in.
        cast: also fill floating tensors of another dtype than the checkpoint's, through a tensor of that dtype; all
            such tensors are held twice until they are loaded.
        optional: names of the checkpoint with one of these prefixes need not be given, even if `strict`.
        report: called once on every rank with a line that names the tensors compared with hashes, and the time.

    Returns:
        The metadata that was saved; empty for a checkpoint of torch's. For a module's `sharded_state_dict` its state,
        as in Megatron-LM.

    Raises:
        CheckpointError: on all ranks. Names all missing, unexpected and mismatched tensors; or, after tensors were
            overwritten, all tensors that differ from the saved ones, and the damaged files.
    """
    ranks, folder = Ranks(process_group), folders.absolute_folder(checkpoint_dir)
    source = folders.existing_folder(folder)
    index = ranks.from_first(lambda: read_index(source))
    state = dict(sharded_state_dict)
    stand_ins = {name: _of_stored_dtype(t, index, name) for name, t in state.items()} if cast else {}
    casts = {name: (state[name], stand_in) for name, stand_in in stand_ins.items() if stand_in is not None}
    state |= {name: stand_in for name, (_, stand_in) in casts.items()}
    problems = _problems(state, index, strict, optional, ranks)
    refuse(f"{folder} is a checkpoint of another model or layout", problems)
    targets = {name: tensor for name, tensor in state.items() if name in index.tensors}
    try:
        moved_names = ranks.on_all(lambda: PieceReader(source, index).fill(targets), f"loading {folder}: ")
        line = _verify(targets, source, index, moved_names, verify, ranks)
    except BaseException:
        note_loaded(sharded_state_dict[name] for name in targets)  # damaged, or in part: nobody trains on from it
        raise
    if report is not None:
        report(line)
    for tensor, stand_in in casts.values():
        tensor.detach().copy_(stand_in)
    note_loaded(sharded_state_dict[name] for name in targets)
    return sharded_state_dict.as_loaded() if isinstance(sharded_state_dict, ShardedStateDict) else index.metadata


_called_when_loaded = WeakTensorKeyDictionary()
"""What owners of tensors want to be called at a load. `when_loaded` adds to it. An entry ends with its tensor."""


def when_loaded(tensors: Iterable[Tensor], call: Callable[[], None]) -> None:
    """Makes `note_loaded` of these tensors call a bound method, as long as the tensors and its object exist."""
    method = weakref.WeakMethod(call)
    for tensor in tensors:
        _called_when_loaded[tensor] = method


def note_loaded(tensors: Iterable[Tensor]) -> None:
    """Tells the owners of tensors that a checkpoint, or another rank's copy of one, has filled them."""
    methods = [_called_when_loaded[tensor] for tensor in tensors if tensor in _called_when_loaded]
    for call in {method() for method in methods} - {None}:  # None where the object is gone
        call()


def verify(directory: str | os.PathLike[str], *, process_group: ProcessGroup | None = None) -> None:
    """Reads every byte of a checkpoint and compares it with the hashes that were saved. Collective.

    Raises:
        CheckpointError: on all ranks. Names each damaged file, the bytes, and the tensors that are stored there.
    """
    folder = folders.existing_folder(folders.absolute_folder(directory))
    if problems := damage(folder, Ranks(process_group)):
        raise CheckpointError("; ".join(problems))


def load_metadata(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of a complete checkpoint. Reads no tensors and needs no other ranks.

    Raises:
        CheckpointError: as :func:`load` does, on this rank.
    """
    return read_index(folders.existing_folder(folders.absolute_folder(directory))).metadata


def _verify(
    state: Mapping[str, Tensor], folder: Path, index: CheckpointIndex, moved_names: set[str], all_: bool, ranks: Ranks
) -> str:
    """Compares loaded tensors with the hashes of the index: all, or those in another layout on some rank. Reports
    it."""
    started_at = time.perf_counter()
    hashed_names = {name for name, entry in index.tensors.items() if entry.content_hash is not None}
    names = set().union(*ranks.all_gather(set(state) if all_ else moved_names)) & hashed_names
    if differing := differing_tensors(state, index, names, ranks) if names else []:
        files = damage(folder, ranks) or ["its files are undamaged, and were assembled wrongly: report it"]
        refuse(f"{folder}: the loaded tensors differ from the saved ones ({'; '.join(files)})", differing)
    if not all_:
        return f"{folder} was not compared with its hashes, as was asked"
    if not hashed_names:
        return f"{folder} has no hashes, so that the loaded tensors could not be compared with the saved ones"
    return verified_line(folder, index, names, time.perf_counter() - started_at)


def differing_tensors(state: Mapping[str, Tensor], index: CheckpointIndex, names: set[str], ranks: Ranks) -> list[str]:
    """Returns which of the loaded tensors in `names` differ from the saved ones, over all ranks. Collective.

    Args:
        state: this rank's part of the loaded tensors.
        names: tensors with hashes in the index; the same on all ranks.
    """
    hashes = {name: _box_hashes(state[name]) for name in sorted(names & state.keys())}

    def compare(of_ranks: list[dict[str, list[BoxHash]]]) -> list[list[str]]:
        differing = [
            name
            for name in sorted(names)
            if _differs([box for of_rank in of_ranks for box in of_rank.get(name, [])], index, name)
        ]
        return [differing] * len(of_ranks)

    return ranks.decided_by_first(hashes, compare)


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
    pieces = [(name, part) for name, entry in index.tensors.items() for part in entry.pieces if part.hash is not None]
    pieces.sort(key=lambda entry: (entry[1].file, entry[1].start))
    mine = pieces[ranks.rank * len(pieces) // ranks.size : (ranks.rank + 1) * len(pieces) // ranks.size]
    reader = PieceReader(folder, index)
    bad = ranks.on_all(lambda: [(name, piece) for name, piece in mine if _is_damaged(reader, name, piece)])
    files: dict[str, list[str]] = {}
    for name, piece in (damaged_piece for of_rank in ranks.all_gather(bad) for damaged_piece in of_rank):
        files.setdefault(piece.file, []).append(f"{name} (bytes {piece.start} to {piece.start + piece.num_bytes})")
    return [f"{folder / file} is damaged in {join_parts(places, 5, ', ')}" for file, places in sorted(files.items())]


def verified_line(folder: Path, index: CheckpointIndex, names: set[str], seconds: float) -> str:
    """Says which tensors of a checkpoint were compared with their hashes, and how long that took."""
    num_bytes = sum(piece.num_bytes for name in names for piece in index.tensors[name].pieces)
    return f"verified {len(names)} tensors of {folder} by their hashes: {readable_bytes(num_bytes)} in {seconds:.2f} s"


def _is_damaged(reader: PieceReader, name: str, piece: Piece) -> bool:
    try:
        values = reader.piece_values(name, piece)
    except (OSError, ValueError):  # removed, or cut short, since its length was compared
        return True
    return box_hash(values, piece.offsets, reader.index.tensors[name].shape) != piece.hash


def _differs(box_hashes: list[BoxHash], index: CheckpointIndex, name: str) -> bool:
    entry = index.tensors[name]
    whole = Box((0,) * len(entry.shape), entry.shape)
    hashes: dict[Box, int] = {}
    for box, value in box_hashes:
        if hashes.setdefault(box, value) != value:
            return True  # replicas that are not equal
    if whole in hashes and hashes.pop(whole) != entry.content_hash:
        return True
    volume = sum(torch.Size(box.sizes).numel() for box in hashes)
    if volume != torch.Size(entry.shape).numel() or share_elements(list(hashes)):
        return False  # boxes that overlap, or cover only a part of the tensor: their sum is not comparable
    return sum(hashes.values()) % MODULUS != entry.content_hash


def _box_hashes(tensor: Tensor) -> list[BoxHash]:
    """Returns the boxes of the whole tensor that this rank holds, each with its addend to the hash."""
    return [(Box(*box), box_hash(values, box[0], tensor.shape)) for box, values in held_parts(tensor).items()]


def _of_stored_dtype(tensor: Tensor, index: CheckpointIndex, name: str) -> Tensor | None:
    """Returns an empty tensor of the checkpoint's dtype, or None if nothing has to be cast."""
    entry = index.tensors.get(name)
    if entry is None or entry.dtype == tensor.dtype or isinstance(tensor, FlatRange):
        return None
    return torch.empty_like(tensor.detach(), dtype=entry.dtype) if can_be_cast(entry.dtype, tensor) else None


def _problems(
    state: Mapping[str, Tensor], index: CheckpointIndex, strict: bool, optional: str | tuple[str, ...], ranks: Ranks
) -> list[str]:
    """Returns what keeps tensors of all ranks from being loaded, the same on each. Collective."""
    absent = [f"missing in the checkpoint: {name}" for name in state if name not in index.tensors]
    unclaimed = (index.tensors.keys() | index.others.keys()) - state.keys() if strict else set[str]()
    own = _mismatches(state, index) + (absent if strict else []), unclaimed, len(absent) == len(state)
    answers = ranks.all_gather(own)
    problems = list(dict.fromkeys(problem for of_rank, _, _ in answers for problem in of_rank))
    for name in sorted(set.intersection(*(names for _, names, _ in answers))):
        if not name.startswith(optional):
            problems.append(f"not asked for, but in the checkpoint: {name}")
    if not problems and all(nothing for _, _, nothing in answers):
        problems.append(f"no tensor in common: {len(state)} asked for, {len(index.tensors)} in the checkpoint")
    return problems


def _mismatches(state: Mapping[str, Tensor], index: CheckpointIndex) -> list[str]:
    problems = []
    for name, tensor in state.items():
        entry = index.tensors.get(name)
        if problem := tensor_problem(name, tensor):
            problems.append(problem)
        elif entry is not None and (entry.dtype != tensor.dtype or entry.shape != tuple(tensor.shape)):
            problems.append(
                f"{name} is {dtype_name(entry.dtype)} {list(entry.shape)} in the checkpoint and "
                f"{dtype_name(tensor.dtype)} {list(tensor.shape)} here"
            )
    return problems
