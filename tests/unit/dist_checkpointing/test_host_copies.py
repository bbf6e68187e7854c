"""Copies in memory: which machine keeps which, and what is read once a machine, or a file, is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError
from core.dist_checkpointing import copy_files, host_copies, load
from core.dist_checkpointing.agreement import offers
from core.dist_checkpointing.copy_files import encode_mark, write_mark
from core.dist_checkpointing.format.index import seal
from core.dist_checkpointing.host_copies import HostCopies, fetch_newest, partners, spread_over_nodes
from tests.unit._spawn import on_ranks, run_distributed


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([0, 0, 1, 1], [2, 3, 0, 1]), ([0, 1, 0, 1], [1, 0, 3, 2]), ([0, 1, 1, 1, 2], [1, 4, 4, 4, 0]), ([3, 5], [1, 0])],
    ids=str,
)
def test_a_partner_is_on_another_machine(nodes, expected):
    assert partners(nodes) == expected


def test_one_machine_has_no_partners():
    assert partners([7, 7, 7]) == [None, None, None]


def test_only_what_one_machine_holds_is_sent():
    everywhere, here = torch.zeros(4), torch.zeros(3)
    of_ranks = [offers({"all": everywhere, f"rank{rank}": here}) for rank in range(4)]
    planned = spread_over_nodes(of_ranks, [0, 0, 1, 1])
    assert [[name for name, _ in own] for own, _ in planned] == [[f"rank{rank}"] for rank in range(4)]
    shared = [[name for name, _ in more] for _, more in planned]
    assert sorted(map(len, shared[:2])) == sorted(map(len, shared[2:])) == [0, 1]  # once on each machine
    assert all(not more for _, more in spread_over_nodes(of_ranks, [0, 0, 0, 0]))


def _state(step: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {"all": torch.full((5,), float(step)), f"rank{rank}": torch.full((3,), 10.0 * step + rank)}


def _step_after(roots: list[Path], nodes: list[int]) -> int | None:
    """Loads the newest copy, checks it, and returns its step."""
    rank = dist.get_rank()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
    folder, _ = fetch_newest(roots[rank], lambda: loaded, nodes[rank])
    if folder is None:
        return None
    metadata = load(loaded, folder)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in _state(metadata["step"]).items())
    return metadata["step"]


@on_ranks(3)
def test_what_is_fetched_takes_the_place_of_a_version(tmp_path):
    rank, counts, made = dist.get_rank(), [], copy_files.make_file
    root = Path(tmp_path, f"node{rank}")
    expected = {f"rank{other}": torch.full((3,), 20.0 + other) for other in range(3)} | {"all": torch.full((5,), 2.0)}
    copies = HostCopies(root, 1, _state(1), {"step": 1}, 1, rank)
    copies.start(_state(2), {"step": 2}, 2)
    copies.close()
    copies.wait()
    dist.barrier()

    def count(path, num_bytes, *, has_memory):
        if has_memory:
            counts.append(len({path.parent for path in root.rglob("*.bin")}))
        made(path, num_bytes, has_memory=has_memory)

    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with mock.patch.object(copy_files, "make_file", count):
        newest, _ = fetch_newest(root, lambda: loaded, rank)
    assert load(loaded, newest)["step"] == 2
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())
    assert max(counts) == 1


@on_ranks(2)
def test_a_recovery_keeps_two_versions_at_most(tmp_path):
    counts, made = [], copy_files.make_file

    def count(path, *size):
        counts.append(len({path.parent for path in Path(tmp_path).rglob("rank_*.bin")} | {path.parent}))
        made(path, *size)

    with mock.patch.object(copy_files, "make_file", count):
        for first in (1, 2):
            copies = HostCopies(Path(tmp_path), first, _state(first), {"step": first}, first)
            copies.start(_state(first + 1), {"step": first + 1}, first + 1)
            copies.close()
            dist.barrier()
            newest, _ = fetch_newest(Path(tmp_path), lambda: _state(0))
            assert load(_state(0), newest)["step"] == first + 1
            dist.barrier()
    assert max(counts) == 2


@on_ranks(4)
def test_either_machine_may_be_lost(tmp_path):
    folder = str(tmp_path)
    rank, nodes = dist.get_rank(), [0, 0, 1, 1]
    roots = [Path(folder, f"node{node}") for node in nodes]
    copies = HostCopies(roots[rank], 1, _state(1), {"step": 1}, 1, nodes[rank])
    copies.start(_state(2), {"step": 2}, 2)
    copies.close()
    copies.wait()
    assert copies.num_bytes_sent == 3 * 4
    dist.barrier()
    assert _step_after(roots, nodes) == 2
    if rank == 0:
        shutil.rmtree(roots[2])
    dist.barrier()
    assert _step_after(roots, nodes) == 2  # another machine in the place of the lost one
    shutil.rmtree(roots[2], ignore_errors=True)
    dist.barrier()
    damaged = roots[0] / "generation_00001" / "version_1" / "rank_00003.bin"
    if rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    dist.barrier()
    assert _step_after(roots, nodes) == 1  # the step before, of which all is left
    assert fetch_newest(roots[rank], lambda: _state(0), nodes[rank])[1] == [str(damaged)]
    if rank == 0:
        (damaged.parent.parent / "version_0" / "rank_00000.json").unlink()
    dist.barrier()
    assert _step_after(roots, nodes) is None


def _rewritten(change, path: Path) -> None:
    """Changes a description, and signs it again: what remains is of types that were never written."""
    document = json.loads(path.read_text())
    document.pop("signature", None)
    change(document)
    if path.name == "plan.json":
        path.write_text(json.dumps({**document, "sha256": seal(document)}))
    else:
        path.write_bytes(encode_mark(document, b"", path))


def _replaced(make, path: Path) -> None:
    path.unlink()
    make(path)


_TEXTS = {
    "bytes": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()[2:]),
    "one byte": lambda path: path.write_bytes(path.read_bytes().replace(b"e", b"f", 1)),
    "cut": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 3]),
    "deep": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[1]"),
    "a number of many digits": lambda path: path.write_text("9" * 5000),
}
_FILES = {
    "link": partial(_replaced, lambda path: path.symlink_to("/dev/zero")),
    "pipe": partial(_replaced, os.mkfifo),
    "folder": partial(_replaced, Path.mkdir),
}
_PLANS = {
    "sizes as text": lambda plan: plan.update(file_bytes=dict.fromkeys(plan["file_bytes"], "12")),
    "negative": lambda plan: plan.update(file_bytes=dict.fromkeys(plan["file_bytes"], -1)),
    "names": lambda plan: plan.update(file_bytes={f"../{name}": size for name, size in plan["file_bytes"].items()}),
    "no tables": lambda plan: plan.update(tensors=[1]),
}
_MARKS = {
    "step as text": lambda mark: mark.update(step="2"),
    "step as truth": lambda mark: mark.update(step=True),
    "step as fraction": lambda mark: mark.update(step=2.0),
    "metadata no table": lambda mark: mark.update(metadata=["step", 2]),
    "sums no table": lambda mark: mark.update(sums=7),
    "nothing": lambda mark: mark.clear(),
}
_PIECES = {
    "absent": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}
DAMAGE = {
    "plan.json": _TEXTS | _FILES | {name: partial(_rewritten, change) for name, change in _PLANS.items()},
    "version_1/rank_00000.json": _TEXTS | _FILES | {name: partial(_rewritten, c) for name, c in _MARKS.items()},
    "version_1/rank_00000.bin": _FILES | _PIECES,
}


def _copies_of_two_steps(root: Path, node: int = 0) -> HostCopies:
    copies = HostCopies(root, 1, _state(1), {"step": 1}, 1, node)
    copies.start(_state(2), {"step": 2}, 2)
    copies.wait()
    return copies


@on_ranks(2)
def test_what_is_damaged_is_named_and_absent_on_all_ranks(tmp_path):
    _copies_of_two_steps(Path(tmp_path, "whole")).close()
    found = []
    for file, ways in DAMAGE.items():
        for number, (name, damage) in enumerate(ways.items()):
            root = Path(tmp_path, f"{file.replace('/', '-')}-{number}")
            if dist.get_rank() == 0:
                shutil.copytree(Path(tmp_path, "whole"), root)
                damage(root / "generation_00001" / file)
            dist.barrier()
            loaded = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
            newest, damaged = fetch_newest(root, lambda loaded=loaded: loaded)
            step = load(loaded, newest)["step"] if newest is not None else None
            assert step is None or all(torch.equal(tensor, loaded[n]) for n, tensor in _state(step).items())
            found.append((file, name, step, [str(Path(path).relative_to(root)) for path in damaged]))
    for file, name, step, damaged in found:
        assert step == (None if file == "plan.json" else 1), (file, name)
        assert f"generation_00001/{file}" in damaged, (file, name)


def _full_when(rank: int, is_full):
    """Returns a `write_mark` for which the memory of a rank is full where `is_full` holds for the path."""

    def write(path, data=b"\0", written=write_mark):
        if dist.get_rank() == rank and data != b"\0" and is_full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, data)

    return mock.patch.object(host_copies, "write_mark", write)


def _step_in_snapshot(roots: list[Path], nodes: list[int]) -> int | None:
    """Returns the newest step of what is there, read elsewhere: reading may remove a version that is in use."""
    dist.barrier()
    snapshots = [root.with_name(f"{root.name}-read") for root in roots]
    if dist.get_rank() == 0:
        for root, snapshot in set(zip(roots, snapshots, strict=True)):
            shutil.rmtree(snapshot, ignore_errors=True)
            shutil.copytree(root, snapshot)
    dist.barrier()
    return _step_after(snapshots, nodes)


def _skips(folder: str, nodes: list[int]) -> tuple[list[int | None], list[str]]:
    """Copies steps 3 to 6, of which rank 1 cannot write 3 and 4. Returns the newest after each, and the warnings."""
    rank, steps = dist.get_rank(), []
    roots = [Path(folder, f"node{node}") for node in nodes]
    copies = _copies_of_two_steps(roots[rank], nodes[rank])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3, 7):
            with _full_when(1, lambda path, step=step: step < 5 and path.name == "rank_00001.json"):
                copies.start(_state(step), {"step": step}, step)
                copies.wait()
            steps.append(_step_in_snapshot(roots, nodes))
        copies.close()
    return steps, [str(warning.message) for warning in warned]


def _grows(folder: str) -> tuple[list[int | None], list[str]]:
    steps, copies = [], _copies_of_two_steps(Path(folder, "run"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (3, 4, 5):
            metadata = {"step": step, "history": [1] * (4000 * dist.get_rank())}  # of one rank
            copies.start(_state(step), metadata, step)
            copies.wait()
            steps.append(_step_in_snapshot([Path(folder, "run")] * 2, [0, 0]))
        copies.close()
    return steps, [str(warning.message) for warning in warned]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one machine", "two"])
def test_a_full_memory_skips_copies_and_keeps_the_one_before(tmp_path, nodes):
    of_ranks = run_distributed(_skips, 2, str(tmp_path), nodes)
    assert [steps for steps, _ in of_ranks] == [[2, 2, 5, 6]] * 2
    (_, others), (_, (warned,)) = of_ranks
    assert others == []
    assert warned.startswith("rank 1: a copy in memory is skipped (step 3, ") and "No space left" in warned


def test_metadata_may_grow(tmp_path):
    of_ranks = run_distributed(_grows, 2, str(tmp_path))
    assert [steps for steps, _ in of_ranks] == [[2, 4, 5]] * 2
    assert ["metadata has grown to 12" in text for _, texts in of_ranks for text in texts] == [True]


def _forges(folder: str) -> tuple[int | None, list[str]]:
    """Rank 0 signs its mark of step 3 with another secret, for its partner on the other machine."""
    rank, nodes = dist.get_rank(), [0, 1]
    roots = [Path(folder, f"node{node}") for node in nodes]
    copies = _copies_of_two_steps(roots[rank], rank)

    def forged(mark, secret, path, encoded=encode_mark):
        return encoded(mark, b"another" if rank == 0 else secret, path)

    with mock.patch.object(copy_files, "encode_mark", forged), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        copies.start(_state(3), {"step": 3}, 3)
        copies.wait()
    dist.barrier()
    unfinished = (roots[1] / "generation_00001" / "version_0" / "rank_00000.json").read_bytes()[:1] == b"\0"
    assert rank == 0 or unfinished
    step = _step_after(roots, nodes)
    copies.close()
    return step, [str(warning.message) for warning in warned]


def test_a_mark_that_another_signed_is_not_written(tmp_path):
    (first, said_first), (second, said) = run_distributed(_forges, 2, str(tmp_path))
    assert (first, second, said_first) == (2, 2, [])
    assert len(said) == 1 and "no mark of this place that this job has signed" in said[0]


def _full(calls: int):
    """Returns a `posix_fallocate` for which the memory of rank 1 is full from a call on."""
    made = []

    def allocate(descriptor, start, length, allocate=os.posix_fallocate):
        made.append(length)
        if dist.get_rank() == 1 and len(made) > calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, start, length)

    return mock.patch.object(os, "posix_fallocate", allocate)


@on_ranks(2)
def test_what_was_loaded_stays_where_new_copies_do_not_fit(tmp_path):
    steps = []
    for number, calls in enumerate((1, 2)):
        root = Path(tmp_path, str(number))
        _copies_of_two_steps(root).close()
        assert _step_after([root] * 2, [0, 0]) == 2
        with _full(calls), pytest.raises(CheckpointError, match=r"no memory for \d+ bytes of copies \(No space left"):
            HostCopies(root, 2, _state(2), {"step": 2}, 2)
        dist.barrier()
        left = sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_dir())
        assert left == [["generation_00001/version_1"], ["generation_00002/version_0"]][number]
        dist.barrier()
        steps.append(_step_after([root] * 2, [0, 0]))
    assert steps == [2, 2]


@on_ranks(2)
def test_copies_are_read_where_the_memory_is_full(tmp_path):
    rank, root = dist.get_rank(), Path(tmp_path, "one")
    _copies_of_two_steps(root).close()

    def write(path, text, written=host_copies.write_durably):
        if (root / "generation_00001" / "version_0").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, text)

    with mock.patch.object(host_copies, "write_durably", write):
        step = _step_after([root] * 2, [0, 0])
    dist.barrier()
    roots = [Path(tmp_path, f"node{node}") for node in range(2)]
    _copies_of_two_steps(roots[rank], rank).close()
    dist.barrier()
    if rank == 1:
        shutil.rmtree(roots[1])
    dist.barrier()
    with _full(0):
        newest, unread = fetch_newest(roots[rank], lambda: _state(0), rank)
    assert (step, newest, len(unread)) == (2, None, 1)
    assert "No space left" in unread[0]
