"""Keeps copies of a run's state in host memory that outlives the process, to continue from after a lost rank.

    root/                                a folder of a file system in memory, on each machine
      generation_00002/
        plan.json                        the index of the copies that this machine needs to continue alone
        version_0/  rank_00000.bin       the bytes of a rank's pieces, as in a checkpoint
                    shared_00000.bin     those that ranks of every machine hold
                    rank_00000.json      the mark: the step that both are of, and their sums (`copy_files`)
        version_1/  ...                  the step before

Each rank copies the pieces that it would write of a checkpoint: what several ranks hold, as parameters under DDP, is
copied once. With several machines each copies all that ranks of every machine hold, and a rank sends the rest to a
partner on another machine, in pieces over a group of gloo's, so that either machine may be lost. On one machine
nothing is sent: a partner's memory would be lost with one's own.

Of the two versions one is complete on every rank and partner at any moment: at its end ranks agree whether a copy is
complete on all, and the next one overwrites it if not, else the one before. All files have their memory before the
first step; a copy that cannot be written all the same is skipped, with a warning. A version whose files are all left,
undamaged, on any machine is read as a checkpoint, by any number of ranks in any layout.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import device
from ..base.errors import CheckpointError
from ..base.files import write_durably
from ..comm.background_copies import BackgroundCopies
from ..rendezvous.job_secret import job_secret
from . import agreement, copy_files
from .agreement import Key, Offer, Ranks
from .copy_files import PLAN_FILE, VERSIONS, map_file, word_sum, write_mark
from .format.index import INDEX_FILE, CheckpointIndex, encode_index
from .format.reader import PieceReader

_PIECE_BYTES = 1 << 23
"""Bytes sent at a time, so that messages of the step get their turn."""
_MARK_BYTES = 4096
"""Bytes of a mark, beyond twice the length of the first metadata."""


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
        CheckpointError: on all ranks: the memory is too small. The version that was loaded last stays, or this one's
            first.
        ConfigError: the secret of the job cannot be used.
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
        self._secret, self._rank = job_secret(), ranks.rank
        self._folder = root / copy_files.GENERATION.format(generation)
        nodes = ranks.all_gather(node)  # behind it all have loaded what they continue from
        is_first_of_node = ranks.rank == nodes.index(node)
        ranks.on_all(lambda: _remove_all_but(root, _last_loaded(root)) if is_first_of_node else None)
        self._partner = partners(nodes)[ranks.rank]
        # All fixed: the pieces that this rank copies, its files, its own and that of what all machines hold, and the
        # place of each piece in them.
        decide = partial(spread_over_nodes, nodes=nodes)
        own, shared = agreement.planned_pieces(tensors, metadata, self._folder, ranks, decide)
        self._keys = own + shared
        self._files, offers = (f"rank_{ranks.rank:05d}.bin", f"shared_{ranks.rank:05d}.bin"), agreement.offers(tensors)
        pieces, num_bytes = agreement.place_pieces(offers, own, self._files[0])
        more_pieces, more_bytes = agreement.place_pieces(offers, shared, self._files[1])
        self._places = [
            (piece, offers[name].dtype) for (name, _), piece in zip(self._keys, pieces + more_pieces, strict=True)
        ]
        entries = agreement.entries(offers, own, pieces), agreement.entries(offers, shared, more_pieces)
        of_ranks = ranks.all_gather((num_bytes, *entries, len(json.dumps(dict(metadata)))))
        # The length of every mark, and of its message, on all ranks. `wait` sets what the last copy has agreed on.
        self._mark_bytes = _MARK_BYTES + 2 * max(metadata_bytes for *_, metadata_bytes in of_ranks)
        self._sources = [rank for rank, partner in enumerate(partners(nodes)) if partner == ranks.rank]
        sizes = dict(zip(self._files, (num_bytes, more_bytes), strict=True))
        sizes |= {f"rank_{rank:05d}.bin": of_ranks[rank][0] for rank in self._sources}
        # For both versions: the files that this rank writes, mapped until this object is freed; its pieces in them.
        # `_allocate` adds a version.
        self._memory: list[dict[str, Tensor]] = []
        self._copies: list[list[Tensor]] = []
        of_node = [more for (_, _, more, _), at in zip(of_ranks, nodes, strict=True) if at == node]
        index = CheckpointIndex(*agreement.join_entries([own for _, own, _, _ in of_ranks] + of_node))
        self._allocate(ranks, sizes, encode_index(index) if is_first_of_node else "")
        device.set_backend_defaults()  # the maker of the default group may not have asked for it
        # For messages of the thread below alone. None after `close`, and for one rank.
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self._from_device = BackgroundCopies()
        # Writes one copy at a time. The last one is under way until `wait`, which clears it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-copies")
        self._running: Future[tuple[str, bool, int]] | None = None
        # The version that the next copy overwrites: the older one, or that of a copy which is not complete on all
        # ranks. `wait` sets it.
        self._next = 0
        # Whether the last copy was skipped, so that no more is said of the next ones. `wait` sets it.
        self._is_behind = False
        self.num_bytes = sum(sizes.values())
        """Bytes of one version that this rank writes, its partners' pieces among them."""
        self.num_bytes_sent = 0 if self._partner is None else num_bytes
        """Bytes that this rank sends to its partner in each copy."""
        self.start(tensors, metadata, step)
        self._replace_older(ranks, sizes, root if is_first_of_node else None)

    def _replace_older(self, ranks: Ranks, sizes: dict[str, int], root: Path | None) -> None:
        """Waits for the first copy, and removes copies of other generations from `root`, for the second version."""
        self.wait()
        if self._is_behind:
            raise CheckpointError(f"{self._folder}: the first copy cannot be written; use --on-lost-rank restart")
        for folder in root.glob("generation_*") if root is not None else ():
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)
        ranks.all_gather(None)  # the old versions make room for the second one
        self._allocate(ranks, sizes)

    def start(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int) -> None:
        """Begins to copy. Call `wait` before a tensor changes, buffers excepted, which are copied at once."""
        self.wait()
        pieces = agreement.held_pieces({name: _at_once(tensor) for name, tensor in tensors.items()})
        values = [pieces[key] for key in self._keys]
        copy = partial(self._from_device.copy, self._copies[self._next], values, BackgroundCopies.begin(values))
        self._running = self._thread.submit(self._copy, self._next, copy, step, dict(metadata))

    def wait(self) -> None:
        """Waits until the last copy has ended on all ranks. Warns if it was skipped because of this one."""
        running, self._running = self._running, None
        if running is None:
            return
        problem, is_complete, self._mark_bytes = running.result()
        if is_complete:
            self._next = 1 - self._next
        if problem and not self._is_behind:
            what = "a loss goes back to the one before; make room in the file system in memory"
            warnings.warn(f"rank {self._rank}: a copy in memory is skipped ({problem}); {what}", stacklevel=2)
        self._is_behind = not is_complete

    def close(self) -> None:
        """Waits for the last copy, and ends the thread. The copies stay."""
        self._thread.shutdown()
        self._group = None

    def _copy(
        self, number: int, copy: Callable[[], None], step: int, metadata: dict[str, Any]
    ) -> tuple[str, bool, int]:
        """Overwrites a version.

        Args:
            copy: copies this rank's pieces into it.

        Returns:
            why this rank could not, or "", whether all have, and the bytes that the next mark may have.
        """
        folder, memory = self._folder / VERSIONS[number], self._memory[number]
        path, text, mark, problem = copy_files.mark_path(folder / self._files[0]), b"", b"", ""
        try:
            for rank in (self._rank, *self._sources):
                write_mark(folder / f"rank_{rank:05d}.json")
            copy()
            sums = {file: word_sum(memory[file]) for file in self._files if len(memory[file])}
            text = copy_files.encode_mark({"step": step, "metadata": metadata, "sums": sums}, self._secret, path)
            if len(text) > self._mark_bytes:  # the next one may be longer, on all ranks
                raise OSError(errno.EFBIG, f"metadata has grown to {len(text)} bytes")
            mark = text[:-1].ljust(self._mark_bytes - 1) + text[-1:]
            write_mark(path, mark)
        except OSError as error:
            problem = f"{path}: {error}"
        if self._partner is not None:
            problem = self._exchange(folder, memory, b"" if problem else mark) or problem
        agreed = torch.tensor([bool(problem), max(self._mark_bytes, 2 * len(text))])
        if self._group is not None:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return problem and f"step {step}, {problem}", not agreed[0], int(agreed[1])

    def _exchange(self, folder: Path, memory: Mapping[str, Tensor], mark: bytes) -> str:
        """Sends this rank's own file to its partner, and receives the files of the ranks whose partner it is.

        Args:
            mark: its text; empty if it could not be written, and the partner shall not write it either.

        Returns:
            why the mark of one of those ranks was not written, or "".
        """
        sent = torch.frombuffer(bytearray(mark or self._mark_bytes), dtype=torch.uint8)
        messages = [part for part in (sent, *memory[self._files[0]].split(_PIECE_BYTES)) if len(part)]
        works = [dist.isend(part, self._partner, group=self._group) for part in messages]
        problem = ""
        for rank in self._sources:
            received = torch.empty_like(sent)
            for part in (received, *memory[f"rank_{rank:05d}.bin"].split(_PIECE_BYTES)):
                if len(part):
                    dist.recv(part, rank, group=self._group)
            path, data = folder / f"rank_{rank:05d}.json", bytes(received.numpy())
            try:
                if copy_files.decode_mark(data, self._secret, path) is not None:
                    write_mark(path, data)
            except (OSError, ValueError) as error:
                problem = f"{path}: {error}"
        for work in filter(None, works):
            work.wait()
        return problem

    def _allocate(self, ranks: Ranks, sizes: dict[str, int], plan: str = "") -> None:
        """Makes the files of a version on all ranks, and the plan if this one writes it. Leaves none if one fails."""
        folder = self._folder / VERSIONS[len(self._memory)]
        marks = {copy_files.mark_path(Path(file)).name: self._mark_bytes for file in sizes}

        def make() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for file, size in (sizes | marks).items():
                    copy_files.make_file(folder / file, size)
                self._memory.append({file: map_file(folder / file, size) for file, size in sizes.items()})
                if plan:
                    write_durably(self._folder / PLAN_FILE, plan)
            except OSError as error:
                raise CheckpointError(
                    f"{folder}: no memory for {sum(sizes.values())} bytes of copies ({error.strerror}); enlarge the "
                    "file system in memory, or use --on-lost-rank restart"
                ) from None

        try:
            ranks.on_all(make)
        except CheckpointError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        memory = self._memory[-1]
        in_bytes = [(memory[p.file][p.start : p.start + p.num_bytes], p.sizes, dtype) for p, dtype in self._places]
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


def fetch_newest(
    root: Path, targets: Callable[[], Mapping[str, Tensor]], node: int = 0
) -> tuple[Path | None, list[str]]:
    """Makes the newest version whose files are all left, on whichever machine, readable. Collective.

    Args:
        targets: returns what this rank loads: its machine fetches the files of them alone.

    Returns:
        the folder to `load` from, each machine's own, or None, and what is damaged, or cannot be fetched.

    Raises:
        ConfigError: the secret of the job cannot be used.
    """
    ranks, secret = Ranks(), job_secret()
    nodes = ranks.all_gather(node)
    local = [rank for rank, at in enumerate(nodes) if at == node]
    found, damaged = ranks.on_all(lambda: copy_files.find_versions(root, secret, local.index(ranks.rank), len(local)))
    scans = ranks.all_gather(
        ({name: ([*plan.file_bytes], steps) for name, (plan, steps, _) in found.items()}, damaged)
    )
    unread = list(dict.fromkeys(path for _, paths in scans for path in paths))
    complete, holders = _complete_versions([steps for steps, _ in scans])
    if not complete:
        return None, unread
    step, version, planner = max(complete)
    folder = root / version
    # What the planner has found, not read again: it may be damaged since.
    plan, _, metadata_of = found[version] if ranks.rank == -planner else (CheckpointIndex({}, {}), {}, {step: {}})
    index = ranks.all_gather(dataclasses.replace(plan, metadata=metadata_of[step]))[-planner]
    loaded = targets()
    files_of_ranks = ranks.all_gather(ranks.on_all(lambda: PieceReader(folder, index).files_of(loaded)))
    held = {(file, nodes[rank]) for file in index.file_bytes for rank in holders[version, file, step]}
    missing = {(file, at) for files, at in zip(files_of_ranks, nodes, strict=True) for file in files} - held
    ends = [(file, holders[version, file, step][0], nodes.index(at)) for file, at in sorted(missing)]

    def prepare() -> dict[str, Tensor]:
        """Returns the files that this rank sends or receives."""
        if ranks.rank == local[0]:
            of_node = [{file for file, at in places if at == node} for places in (held, missing)]
            _make_readable(root, folder, index, *of_node)
        return {file: map_file(folder / file, index.file_bytes[file]) for file, *of in ends if ranks.rank in of}

    try:
        memory = ranks.on_all(prepare)
    except (CheckpointError, OSError) as error:  # the memory is full
        return None, [*unread, f"{folder} ({agreement.error_text(error)})"]
    group = dist.new_group(backend="gloo") if missing else None
    for file, source, target in ends:
        for part in memory[file].split(_PIECE_BYTES) if ranks.rank in (source, target) else ():
            if ranks.rank == source:
                dist.send(part, target, group=group)
            else:
                dist.recv(part, source, group=group)
    ranks.all_gather(None)
    return folder, unread


def _complete_versions(
    of_ranks: Sequence[Mapping[str, tuple[list[str], Mapping[str, int]]]],
) -> tuple[list[tuple[int, str, int]], dict[tuple[str, str, int], list[int]]]:
    """Returns versions whose files are all left, as step, version and the negative of a rank that has its plan, and
    the ranks whose machines hold each version's file of a step.

    Args:
        of_ranks: by version, the files that a machine's plan names, and the step of those that a rank has found whole.
    """
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
    return complete, holders


def _make_readable(root: Path, folder: Path, index: CheckpointIndex, held: set[str], missing: set[str]) -> None:
    """Completes a version on this machine by its index, files to be fetched, and files that no rank here reads."""
    if missing:  # what is fetched takes the place of the other version
        _remove_all_but(root, folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_durably(folder / INDEX_FILE, encode_index(index))
    except OSError:  # the memory is full
        _remove_all_but(root, folder)
        write_durably(folder / INDEX_FILE, encode_index(index))
    for file, size in index.file_bytes.items():
        if file not in held:
            copy_files.make_file(folder / file, size, has_memory=file in missing)


def _last_loaded(root: Path) -> Path | None:
    """Returns the version that ranks have loaded last."""
    return max((p.parent for p in root.glob(f"*/*/{INDEX_FILE}")), key=lambda p: p.stat().st_mtime_ns, default=None)


def _remove_all_but(root: Path, kept: Path | None) -> None:
    """Removes all versions but one, so that two are the most in a recovery too."""
    for folder in root.glob("generation_*/version_*"):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)


def _at_once(tensor: Tensor) -> Tensor:
    """Returns a copy of a buffer, which a forward may change, and any other tensor as it is."""
    return tensor.clone() if agreement.is_of_first_rank(tensor) else tensor
