"""Copies in memory: which machine keeps which, and what is read once a machine, or a file, is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.dist_checkpointing import host_copies, load
from core.dist_checkpointing.agreement import offers
from core.dist_checkpointing.copy_files import word_sum
from core.dist_checkpointing.host_copies import HostCopies, fetch_newest, partners, spread_over_nodes
from tests.unit._spawn import run_distributed


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


@pytest.mark.parametrize("at", [0, 7, 8, 16])
def test_a_changed_byte_changes_the_sum(at):
    data = torch.arange(17, dtype=torch.uint8)
    changed = data.clone()
    changed[at] ^= 128
    assert word_sum(changed) != word_sum(data)


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


def _loses(folder: str) -> None:
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


def _counts_versions(folder: str) -> int:
    """Returns how many versions there are at most while copies of a second generation are made."""
    counts, made = [], host_copies.make_file

    def count(path, *size):
        counts.append(len({path.parent for path in Path(folder).rglob("rank_*.bin")} | {path.parent}))
        made(path, *size)

    with mock.patch.object(host_copies, "make_file", count):
        for first in (1, 2):
            copies = HostCopies(Path(folder), first, _state(first), {"step": first}, first)
            copies.start(_state(first + 1), {"step": first + 1}, first + 1)
            copies.close()
            dist.barrier()
            newest, _ = fetch_newest(Path(folder), lambda: _state(0))
            assert load(_state(0), newest)["step"] == first + 1
            dist.barrier()
    return max(counts)


def _counts_versions_while_fetching(folder: str) -> int:
    rank, counts, made = dist.get_rank(), [], host_copies.make_file
    root = Path(folder, f"node{rank}")
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
    with mock.patch.object(host_copies, "make_file", count):
        newest, _ = fetch_newest(root, lambda: loaded, rank)
    assert load(loaded, newest)["step"] == 2
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())
    return max(counts)


def test_what_is_fetched_takes_the_place_of_a_version(tmp_path):
    assert run_distributed(_counts_versions_while_fetching, 3, str(tmp_path)) == [1, 1, 1]


def test_a_recovery_keeps_two_versions_at_most(tmp_path):
    assert run_distributed(_counts_versions, 2, str(tmp_path)) == [2, 2]


def test_either_machine_may_be_lost(tmp_path):
    run_distributed(_loses, 4, str(tmp_path))
