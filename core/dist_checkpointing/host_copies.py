"""Keeps copies of a run's state in host memory that outlives the process, to continue from after a lost rank.

    root/                                a folder of a file system in memory, on each machine
      generation_00002/
        plan.json                        the index of the copies that this machine needs to continue alone
        version_0/  rank_00000.bin       the bytes of a rank's pieces, as in a checkpoint
                    shared_00000.bin     those that ranks of every machine hold
                    rank_00000.json      the step that both are of, and their sums; absent while they are written
        version_1/  ...                  the step before

Each rank copies the pieces that it would write of a checkpoint: what several ranks hold, as parameters under DDP, is
copied once. With several machines each copies all that ranks of every machine hold, and a rank sends the rest to a
partner on another machine, in pieces over a group of gloo's, so that either machine may be lost. On one machine
nothing is sent: a partner's memory would be lost with one's own.

Of the two versions one is complete on every rank and partner at any moment, if ranks call `wait` between the start of
a copy and a collective of all ranks before the next one. A version whose files are all left, undamaged, on any machine
is read as a checkpoint, by any number of ranks in any layout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..base import device
from ..base.errors import CheckpointError
from ..base.files import write_durably
from . import agreement
from .agreement import Key, Offer, Ranks
from .format.index import INDEX_FILE, CheckpointIndex, Piece, TensorEntry, decode_index, encode_index
from .format.reader import PieceReader

_PLAN_FILE, _GENERATION, _SUMS = "plan.json", "generation_{:05d}", "sums"
_PIECE_BYTES = 1 << 23
"""Sent at a time, so that messages of the step get their turn."""


class HostCopies:
    """The copies of one generation of ranks. Made by all ranks together, with the first copy.

    Args:
        root: folder in memory that all ranks of this machine share, and that outlives them.
        generation: its number, larger than those before. Removes their copies: at once, but for the version that was
            loaded last, which stays until this generation's first copy is complete.
        tensors: as for `save`. Later copies are of tensors with these names and layouts.
        metadata: as for `save`.
        step: number of the step that the tensors are of.
        node: number of this machine.

    Raises:
        CheckpointError: on all ranks: the memory is too small.
    """

    def __init__(
        self,
        root: Path,
        generation: int,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        step: int,
        node: int = 0,
    ) -> None:
        ranks = Ranks()
        self._folder, self._name = root / _GENERATION.format(generation), f"rank_{ranks.rank:05d}"
        nodes = ranks.all_gather(node)  # behind it all have loaded what they continue from
        is_first_of_node = ranks.rank == nodes.index(node)
        if is_first_of_node:
            _remove_all_but_loaded(root)
        self._partner = partners(nodes)[ranks.rank]
        # Pieces that this rank copies, fixed: those in its own file, and in that of what all machines hold.
        decide = partial(spread_over_nodes, nodes=nodes)
        own, shared = agreement.planned_pieces(tensors, metadata, self._folder, ranks, decide)
        self._keys = own + shared
        names = f"{self._name}.bin", f"shared_{ranks.rank:05d}.bin"
        entries, num_bytes, places = _places(agreement.offers(tensors), own, names[0])
        more_entries, more_bytes, more_places = _places(agreement.offers(tensors), shared, names[1])
        of_ranks = ranks.all_gather((num_bytes, entries, more_entries))
        self._sources = [rank for rank, partner in enumerate(partners(nodes)) if partner == ranks.rank]
        sizes = {names[0]: num_bytes, names[1]: more_bytes}
        sizes |= {f"rank_{rank:05d}.bin": of_ranks[rank][0] for rank in self._sources}
        # For both versions: the files that this rank writes, mapped until this object is freed; its pieces in them.
        # `_allocate` adds a version.
        self._memory: list[dict[str, Tensor]] = []
        self._copies: list[list[Tensor]] = []
        ranks.on_all(lambda: self._allocate(sizes, places + more_places))
        if is_first_of_node:
            of_node = [more for (_, _, more), at in zip(of_ranks, nodes, strict=True) if at == node]
            all_entries, file_bytes = agreement.join_entries([own for _, own, _ in of_ranks] + of_node)
            write_durably(self._folder / _PLAN_FILE, encode_index(CheckpointIndex(all_entries, file_bytes)))
        device.set_backend_defaults()  # the maker of the default group may not have asked for it
        # For messages between partners alone, which the thread below waits for; None without partners.
        self._group = dist.new_group(backend="gloo") if self._partner is not None else None
        # Writes one copy at a time. The last one is under way until `wait`, which clears it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-copies")
        self._running: Future[None] | None = None
        # The version that the next copy overwrites: the older one.
        self._next = 0
        self.num_bytes = sum(sizes.values())
        """Bytes of one version that this rank writes, its partners' pieces among them."""
        self.num_bytes_sent = 0 if self._partner is None else num_bytes
        """Bytes that this rank sends to its partner in each copy."""
        self.start(tensors, metadata, step)
        self.wait()
        ranks.all_gather(None)
        if is_first_of_node:
            for folder in root.glob("generation_*"):
                if folder != self._folder:
                    shutil.rmtree(folder, ignore_errors=True)
        ranks.all_gather(None)  # the old versions make room for the second one
        ranks.on_all(lambda: self._allocate(sizes, places + more_places))

    def start(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int) -> None:
        """Begins to copy. Call `wait` before a tensor changes, buffers excepted, which are copied at once."""
        self.wait()
        pieces = agreement.held_pieces({name: _at_once(tensor) for name, tensor in tensors.items()})
        values = [pieces[key] for key in self._keys]
        version, self._next = self._next, 1 - self._next
        mark = {"step": step, "metadata": dict(metadata)}
        self._running = self._thread.submit(self._copy, version, values, mark)

    def wait(self) -> None:
        """Waits until the last copy of this rank, and of those whose partner it is, is complete."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits for the last copy, and ends the thread. The copies stay."""
        self._thread.shutdown()
        self._group = None

    def _copy(self, version: int, values: list[Tensor], mark: dict[str, Any]) -> None:
        folder, memory = self._folder / f"version_{version}", self._memory[version]
        for rank in self._sources:
            (folder / f"rank_{rank:05d}.json").unlink(missing_ok=True)
        (folder / f"{self._name}.json").unlink(missing_ok=True)
        for copy, value in zip(self._copies[version], values, strict=True):
            copy.copy_(value.detach())
        own = (f"{self._name}.bin", self._name.replace("rank", "shared") + ".bin")
        text = json.dumps({**mark, _SUMS: {file: word_sum(memory[file]) for file in own if len(memory[file])}})
        _write_mark(folder / f"{self._name}.json", text)
        if self._partner is not None:
            self._exchange(folder, memory, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))

    def _exchange(self, folder: Path, memory: Mapping[str, Tensor], text: Tensor) -> None:
        """Sends this rank's own file to its partner, and takes those of the ranks whose partner it is."""
        messages = [torch.tensor([len(text)]), text, *memory[f"{self._name}.bin"].split(_PIECE_BYTES)]
        works = [dist.isend(part, self._partner, group=self._group) for part in messages if len(part)]
        for rank in self._sources:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, rank, group=self._group)
            mark = torch.empty(int(length), dtype=torch.uint8)
            for part in (mark, *memory[f"rank_{rank:05d}.bin"].split(_PIECE_BYTES)):
                if len(part):
                    dist.recv(part, rank, group=self._group)
            _write_mark(folder / f"rank_{rank:05d}.json", bytes(mark.numpy()).decode())
        for work in works:
            if work is not None:
                work.wait()

    def _allocate(self, sizes: Mapping[str, int], places: Sequence[tuple[Piece, torch.dtype]]) -> None:
        folder = self._folder / f"version_{len(self._memory)}"
        folder.mkdir(parents=True, exist_ok=True)
        memory = {file: _map_file(folder / file, size) for file, size in sizes.items()}
        self._memory.append(memory)
        in_bytes = [(memory[p.file][p.start : p.start + p.num_bytes], p.sizes, dtype) for p, dtype in places]
        self._copies.append([part.view(dtype).view(sizes) for part, sizes, dtype in in_bytes])


def partners(nodes: Sequence[int]) -> list[int | None]:
    """Returns the rank whose machine keeps another copy of each rank's state: on the next machine, never on its own.

    Args:
        nodes: the machine of each rank. With one alone there are no partners.
    """
    machines = sorted(set(nodes))
    if len(machines) == 1:
        return [None] * len(nodes)
    partner_ranks: list[int | None] = []
    for rank, node in enumerate(nodes):
        after = machines[(machines.index(node) + 1) % len(machines)]
        there = [other for other, at in enumerate(nodes) if at == after]
        partner_ranks.append(there[list(nodes[:rank]).count(node) % len(there)])
    return partner_ranks


def spread_over_nodes(
    of_ranks: Sequence[Mapping[str, Offer]], nodes: Sequence[int]
) -> list[tuple[list[Key], list[Key]]]:
    """Returns the boxes that each rank copies: those that it has a partner for, and its machine's share of those that
    ranks of every machine hold. Of a single machine all are of the first kind."""
    machines_of: dict[Key, set[int]] = {}
    for of_rank, node in zip(of_ranks, nodes, strict=True):
        for name, offer in of_rank.items():
            for box in () if offer.of_first_rank else offer.boxes:
                machines_of.setdefault((name, box), set()).add(node)
    everywhere = {key for key, machines in machines_of.items() if len(machines) == len(set(nodes)) > 1}

    def part(of_rank: Mapping[str, Offer], shared: bool) -> dict[str, Offer]:
        return {
            name: dataclasses.replace(o, boxes=tuple(b for b in o.boxes if ((name, b) in everywhere) == shared))
            for name, o in of_rank.items()
        }

    own = agreement.spread([part(of_rank, False) for of_rank in of_ranks])
    shared: list[list[Key]] = [[] for _ in nodes]
    for node in set(nodes):
        of_node = [part(of_rank, True) if at == node else {} for of_rank, at in zip(of_ranks, nodes, strict=True)]
        for keys, more in zip(shared, agreement.spread(of_node) if any(of_node) else [], strict=False):
            keys += more
    return list(zip(own, shared, strict=True))


def word_sum(data: Tensor) -> int:
    """Returns the sum of bytes read as 64-bit words, modulo 2^64, signed. It shows any change of one word."""
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum() + data[whole:].sum())


def fetch_newest(
    root: Path, targets: Callable[[], Mapping[str, Tensor]], node: int = 0
) -> tuple[Path | None, list[str]]:
    """Makes the newest version whose files are all left, on whichever machine, readable. Collective.

    Args:
        targets: returns what this rank loads: its machine fetches the files of them alone.

    Returns:
        the folder to `load` from, each machine's own, or None, and the files that are damaged.
    """
    ranks = Ranks()
    nodes = ranks.all_gather(node)
    local = [rank for rank, at in enumerate(nodes) if at == node]
    scans = ranks.all_gather(_scan(root, local.index(ranks.rank), len(local)))
    of_ranks, damaged_files = [copies for copies, _ in scans], [path for _, paths in scans for path in paths]
    holders: dict[tuple[str, str, int], list[int]] = {}
    for rank, versions in enumerate(of_ranks):
        for version, (_, steps) in versions.items():
            for file, step in steps.items():
                holders.setdefault((version, file, step), []).append(rank)
    complete = [
        (step, version, -rank)
        for rank, versions in enumerate(of_ranks)
        for version, (files, steps) in versions.items()
        for step in set(steps.values())
        if all((version, file, step) in holders for file in files)
    ]
    if not complete:
        return None, damaged_files
    step, version, planner = max(complete)
    folder = root / version
    folder.mkdir(parents=True, exist_ok=True)
    description: tuple[str, dict[str, Any]] = "", {}
    if ranks.rank == -planner:
        file = next(file for file, of_file in of_ranks[ranks.rank][version][1].items() if of_file == step)
        description = (folder.parent / _PLAN_FILE).read_text(), _mark(folder, file)["metadata"]
    text, metadata = ranks.all_gather(description)[-planner]
    index = dataclasses.replace(decode_index(text), metadata=metadata)
    files_of_ranks = ranks.all_gather(PieceReader(folder, index).files_of(targets()))
    missing = {(file, at) for files, at in zip(files_of_ranks, nodes, strict=True) for file in files}
    missing -= {(file, nodes[rank]) for file in index.file_bytes for rank in holders[version, file, step]}
    if ranks.rank == local[0]:
        write_durably(folder / INDEX_FILE, encode_index(index))
        if node in {at for _, at in missing}:  # what is fetched takes the place of the other version
            _remove_all_but_loaded(root)
    group = dist.new_group(backend="gloo") if missing else None
    for file, at in sorted(missing):
        source, target = holders[version, file, step][0], nodes.index(at)
        if ranks.rank in (source, target):
            data = _map_file(folder / file, index.file_bytes[file], new=ranks.rank == target)
            for part in data.split(_PIECE_BYTES):
                if ranks.rank == source:
                    dist.send(part, target, group=group)
                else:
                    dist.recv(part, source, group=group)
    if ranks.rank == local[0]:
        for file, size in index.file_bytes.items():
            with (folder / file).open("ab") as unread:  # that no rank here reads: it takes no memory
                unread.truncate(size)
    ranks.all_gather(None)
    return folder, damaged_files


def _scan(root: Path, share: int, num_shares: int) -> tuple[dict[str, tuple[list[str], dict[str, int]]], list[str]]:
    """Looks at one of so many shares of the files on this machine.

    Returns:
        for each version the files that the machine's plan names, and the step of those that are complete here. The
        damaged ones.
    """
    copies, damaged_files = {}, []
    for plan in sorted(root.glob(f"generation_*/{_PLAN_FILE}")):
        files = list(decode_index(plan.read_text()).file_bytes)
        for folder in sorted(plan.parent.glob("version_*")):
            steps = {}
            for path in sorted(folder.glob("*.bin"))[share::num_shares]:
                mark = _mark(folder, path.name)
                if path.name not in mark.get(_SUMS, {}):
                    continue
                if word_sum(_map_file(path, path.stat().st_size, new=False)) == mark[_SUMS][path.name]:
                    steps[path.name] = mark["step"]
                else:
                    damaged_files.append(str(path))
            copies[str(folder.relative_to(root))] = files, steps
    return copies, damaged_files


def _remove_all_but_loaded(root: Path) -> None:
    """Removes all versions but the one that ranks have loaded last, so that two are the most in a recovery too."""
    newest = max(root.glob(f"*/*/{INDEX_FILE}"), key=lambda path: path.stat().st_mtime_ns, default=None)
    for folder in root.glob("generation_*/version_*"):
        if newest is None or folder != newest.parent:
            shutil.rmtree(folder, ignore_errors=True)


def _places(
    sources: Mapping[str, Offer], keys: Sequence[Key], file: str
) -> tuple[dict[str, TensorEntry], int, list[tuple[Piece, torch.dtype]]]:
    """Returns the tensors with the places of their pieces in a file, its length, and the place of each piece."""
    end, places = 0, []
    pieces: dict[str, list[Piece]] = {name: [] for name, offer in sources.items() if 0 in offer.shape}
    for name, box in keys:
        start = -(-end // agreement.ALIGNMENT_BYTES) * agreement.ALIGNMENT_BYTES
        end = start + int(np.prod(box.sizes)) * sources[name].dtype.itemsize
        places.append((Piece(box.offsets, box.sizes, file, start, end - start), sources[name].dtype))
        pieces.setdefault(name, []).append(places[-1][0])
    entries = {name: TensorEntry(sources[name].dtype, sources[name].shape, tuple(of)) for name, of in pieces.items()}
    return entries, end, places


def _map_file(path: Path, num_bytes: int, *, new: bool = True) -> Tensor:
    """Returns the bytes of a file in memory, which it makes if `new`."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if new:
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a write to memory that is full ends the process
        except OSError as error:
            raise CheckpointError(
                f"{path}: no memory for {num_bytes} bytes of copies ({error.strerror}); enlarge the file system in "
                "memory, or use --on-lost-rank restart"
            ) from None
    return torch.from_numpy(np.memmap(path, np.uint8, mode="r+", shape=(num_bytes,)))


def _mark(folder: Path, file: str) -> dict[str, Any]:
    """Returns what is written about a file, if it is complete."""
    with suppress(OSError):
        path = folder / file.replace("shared", "rank").replace(".bin", ".json")
        mark: dict[str, Any] = json.loads(path.read_text())
        return mark
    return {}


def _write_mark(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def _at_once(tensor: Tensor) -> Tensor:
    """Returns a copy of a buffer, which a forward may change, and any other tensor as it is."""
    return tensor.clone() if agreement.is_of_first_rank(tensor) else tensor
