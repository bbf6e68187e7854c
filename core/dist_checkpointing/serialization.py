"""Saves tensors from any layout and loads them into any other.

A state is a flat mapping from names to tensors: plain tensors, which every rank that gives the name holds whole, and
DTensors, with a piece on each rank (:func:`global_view` makes them). The name and the shape of the whole
tensor decide where values go; the layout that it was saved in does not matter.

Everything else is stored as JSON in ``metadata``. A value of one rank alone is a tensor with a name of its own
(``rng.rank3``), given by that rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import CheckpointError
from ..base.text import listed
from .agreement import R, Ranks
from .flat_range import FlatRange
from .format import folders
from .format.index import CheckpointIndex, json_problem
from .format.reader import PieceReader, read_index
from .format.verification import damage, differing_tensors, verified_line
from .format.writer import Key, Offer, RawWriter, held_pieces, offers, spread
from .global_view import is_piece
from .model_state import ShardedStateDict

_PROBLEMS_SHOWN = 50


def save(
    sharded_state_dict: Mapping[str, torch.Tensor],
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
    ranks, folder = Ranks(process_group), absolute_folder(checkpoint_dir)
    keys = planned_pieces(state, metadata, folder, ranks, spread)
    held = held_pieces(state)
    write_pieces(offers(state), keys, [held[key] for key in keys], RawWriter(folder, metadata, keep), ranks)


def planned_pieces(
    state: Mapping[str, torch.Tensor],
    metadata: Any,
    folder: Path,
    ranks: Ranks,
    decide: Callable[[list[dict[str, Offer]]], Sequence[R]],
) -> R:
    """Returns what this rank writes of a checkpoint: its entry of what `decide` makes of all `offers`. Collective.

    Raises:
        CheckpointError: on all ranks, if one gave what cannot be saved.
    """
    ranks.on_all(lambda: _refuse(f"{folder} cannot be saved", unsavable(state, metadata)))
    return ranks.decided_by_first(offers(state), decide, f"saving {folder}: ")


def write_pieces(
    offered: Mapping[str, Offer], keys: Sequence[Key], values: Sequence[torch.Tensor], writer: RawWriter, ranks: Ranks
) -> None:
    """Writes the planned boxes of all ranks, and publishes the checkpoint. Collective.

    Args:
        offered: what this rank holds.
        keys: the result of `planned_pieces`.
        values: the values of each box.
    """
    doing, file = f"saving {writer.folder}: ", f"rank_{ranks.rank:05d}.bin"
    try:
        ranks.from_first(writer.begin, doing)
        entries = ranks.on_all(lambda: writer.write(file, offered, keys, values), doing)
        ranks.decided_by_first(entries, writer.finish, doing)
    except BaseException:
        writer.release(failed=True)
        raise
    writer.release(failed=False)


def load(
    sharded_state_dict: Mapping[str, torch.Tensor],
    checkpoint_dir: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    cast: bool = False,
    report: Callable[[str], None] | None = None,
    optional: str | None = None,
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
        optional: names of the checkpoint with this prefix need not be given, even if `strict`.
        report: called once on every rank with a line that names the tensors compared with hashes, and the time.

    Returns:
        The metadata that was saved; empty for a checkpoint of torch's. For a module's `sharded_state_dict` its state,
        as in Megatron-LM.

    Raises:
        CheckpointError: on all ranks. Names all missing, unexpected and mismatched tensors; or, after tensors were
            overwritten, all tensors that differ from the saved ones, and the damaged files.
    """
    ranks, folder = Ranks(process_group), absolute_folder(checkpoint_dir)
    source = folders.existing_folder(folder)
    index = ranks.from_first(lambda: read_index(source))
    state = dict(sharded_state_dict)
    stand_ins = {name: _of_stored_dtype(t, index, name) for name, t in state.items()} if cast else {}
    casts = {name: (state[name], stand_in) for name, stand_in in stand_ins.items() if stand_in is not None}
    state |= {name: stand_in for name, (_, stand_in) in casts.items()}
    problems = _mismatches(state, index)
    stored = index.tensors.keys() | index.others
    absent = [f"missing in the checkpoint: {name}" for name in state if name not in index.tensors]
    answers = ranks.all_gather(
        (problems + absent if strict else problems, stored - state.keys(), len(absent) == len(state))
    )
    if strict:
        unclaimed = set.intersection(*(names for _, names, _ in answers))
        unclaimed = {name for name in unclaimed if optional is None or not name.startswith(optional)}
        problems = [f"not asked for, but in the checkpoint: {name}" for name in sorted(unclaimed)]
    else:
        problems = []
    problems = list(dict.fromkeys([problem for of_rank, _, _ in answers for problem in of_rank] + problems))
    if not problems and all(nothing for _, _, nothing in answers):
        problems = [f"no tensor in common: {len(state)} asked for, {len(index.tensors)} in the checkpoint"]
    _refuse(f"{folder} is a checkpoint of another model or layout", problems)
    targets = {name: tensor for name, tensor in state.items() if name in index.tensors}
    resharded = ranks.on_all(lambda: PieceReader(source, index).fill(targets), f"loading {folder}: ")
    line = _verify(targets, source, index, resharded, verify, ranks)
    if report is not None:
        report(line)
    for tensor, stand_in in casts.values():
        tensor.detach().copy_(stand_in)
    return sharded_state_dict.as_loaded() if isinstance(sharded_state_dict, ShardedStateDict) else index.metadata


def verify(directory: str | os.PathLike[str], *, process_group: ProcessGroup | None = None) -> None:
    """Reads every byte of a checkpoint and compares it with the hashes that were saved. Collective.

    Raises:
        CheckpointError: on all ranks. Names each damaged file, the bytes, and the tensors that are stored there.
    """
    folder = folders.existing_folder(absolute_folder(directory))
    if problems := damage(folder, Ranks(process_group)):
        raise CheckpointError("; ".join(problems))


def load_metadata(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of a complete checkpoint. Reads no tensors and needs no other ranks.

    Raises:
        CheckpointError: as :func:`load` does, on this rank.
    """
    return read_index(folders.existing_folder(absolute_folder(directory))).metadata


def _verify(
    state: Mapping[str, torch.Tensor],
    folder: Path,
    index: CheckpointIndex,
    resharded: set[str],
    all_: bool,
    ranks: Ranks,
) -> str:
    """Compares loaded tensors with the hashes of the index: all, or those in another layout on some rank. Reports
    it."""
    started = time.perf_counter()
    hashed = {name for name, entry in index.tensors.items() if entry.content_hash is not None}
    names = set().union(*ranks.all_gather(set(state) if all_ else resharded)) & hashed
    if differing := differing_tensors(state, index, names, ranks) if names else []:
        files = damage(folder, ranks) or ["its files are undamaged, and were assembled wrongly: report it"]
        _refuse(f"{folder}: the loaded tensors differ from the saved ones ({'; '.join(files)})", differing)
    if not all_:
        return f"{folder} was not compared with its hashes, as was asked"
    if not hashed:
        return f"{folder} has no hashes, so that the loaded tensors could not be compared with the saved ones"
    return verified_line(folder, index, names, time.perf_counter() - started)


def absolute_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the path from the root. Keeps links."""
    return Path(os.path.abspath(directory))  # noqa: PTH100  # resolve() would replace a link by its target


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{what}: {listed(problems, _PROBLEMS_SHOWN)}")


def unsavable(state: Mapping[str, torch.Tensor], metadata: Any) -> list[str]:
    """Returns what no checkpoint can hold of a state and its metadata."""
    problems = [problem for name, tensor in state.items() if (problem := _tensor_problem(name, tensor))]
    if not isinstance(metadata, Mapping):
        problems.append(f"metadata is a {type(metadata).__name__}, and a mapping is needed")
    elif problem := json_problem(dict(metadata)):
        problems.append(problem)
    return problems


def _tensor_problem(name: str, tensor: torch.Tensor) -> str | None:
    if not isinstance(name, str):
        return f"the name {name!r} is no text"
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is a {type(tensor).__name__}, and only tensors are saved here: put it into metadata"
    if dtype_name(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided:
        return f"{name} is {tensor.layout} {tensor.dtype}, which no checkpoint holds"
    if tensor.is_meta:
        return f"{name} is on the meta device and has no values: materialise the model first"
    if is_piece(tensor):
        return f"{name} is one tensor-parallel rank's piece, or has one rank's experts: give global_view({name})"
    return None


def _of_stored_dtype(tensor: torch.Tensor, index: CheckpointIndex, name: str) -> torch.Tensor | None:
    """Returns an empty tensor of the checkpoint's dtype, or None if nothing has to be cast."""
    entry = index.tensors.get(name)
    if entry is None or entry.dtype == tensor.dtype or isinstance(tensor, FlatRange):
        return None
    both_floating = entry.dtype.is_floating_point and tensor.is_floating_point()
    return torch.empty_like(tensor.detach(), dtype=entry.dtype) if both_floating else None


def _mismatches(state: Mapping[str, torch.Tensor], index: CheckpointIndex) -> list[str]:
    problems = []
    for name, tensor in state.items():
        entry = index.tensors.get(name)
        if problem := _tensor_problem(name, tensor):
            problems.append(problem)
        elif entry is not None and (entry.dtype != tensor.dtype or entry.shape != tuple(tensor.shape)):
            problems.append(
                f"{name} is {dtype_name(entry.dtype)} {list(entry.shape)} in the checkpoint and "
                f"{dtype_name(tensor.dtype)} {list(tensor.shape)} here"
            )
    return problems
