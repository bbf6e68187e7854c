"""A checkpoint of every wrapper, on any number of ranks, continues under every other on any other.

What was read has, bit by bit, the contents that were written: weights, moments, step counts. The two steps that
follow are the writer's own two steps. On the same number of ranks, split the same way, they are so to the last bit
at one and two replicas, whose gradients add in one order only, and under the writer's own wrapper; elsewhere sums
round in another order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.functional._checkpoint_matrix import SITES, Outcome, Site, write_and_read
from tests.unit._spawn import run_distributed

Pair = tuple[Site, Site]


def _problems_of(pairs: Sequence[Pair], tied: bool, root: Path, faults: Sequence[str | None] = (None,)) -> list[str]:
    """Writes and reads all `pairs` on the same four processes."""
    limit_s = 600 + 10 * len(pairs)
    of_ranks = run_distributed(write_and_read, 4, pairs, tied, root, faults, limit_s=limit_s)
    written, _ = of_ranks[0]
    assert len(of_ranks[0][1]) == len(pairs) * len(faults)
    return [
        f"{writer} -> {reader}, rank {rank}, {fault}: {problem}"
        for rank, (_, found) in enumerate(of_ranks)
        for (writer, reader, fault), outcome in found.items()
        for problem in _problems(written[writer], outcome, _adds_in_one_order(writer, reader))
    ]


def _adds_in_one_order(writer: Site, reader: Site) -> bool:
    same_layout = all(
        getattr(writer, cut) == getattr(reader, cut) for cut in ("ranks", "tp", "ep", "etp", "pp", "vpp")
    )
    return same_layout and (writer.dp <= 2 or writer.wrapper == reader.wrapper)


def _problems(written: Outcome, found: Outcome, bitwise: bool) -> list[str]:
    problems = []
    if found.differing:
        problems.append(f"{len(found.differing)} tensors have other contents: {', '.join(found.differing[:5])}")
    for what in ("place", "end"):
        if getattr(found, what) != getattr(written, what):
            problems.append(f"{what} is {getattr(found, what)}, and was {getattr(written, what)}")
    losses, norms, distance = (0.0, 0.0, 0.0) if bitwise else (1e-6, 1e-5, 1e-5)
    if found.losses != pytest.approx(written.losses, rel=losses, abs=0):
        problems.append(f"losses are {found.losses}, and were {written.losses}")
    if found.grad_norms != pytest.approx(written.grad_norms, rel=norms, abs=0):
        problems.append(f"gradient norms are {found.grad_norms}, and were {written.grad_norms}")
    if found.distance > distance:
        problems.append(f"after the last step all is off by {found.distance:.1e} of its norm")
    return problems


def _pairwise() -> list[Pair]:
    """Pairs in which every wrapper and every cut writes and reads, to more ranks and fewer, with and without tensor
    parallelism on either side; the long set has every pair.

    Which wrapper wrote is not in the files: the contents of each are compared, bit by bit, with what was written.
    """
    candidates = [*itertools.product(SITES, SITES)]
    random.Random(0).shuffle(candidates)
    missing = {fact for pair in candidates for fact in _facts(pair)}
    chosen: list[Pair] = []
    while missing:
        writers, readers = {writer for writer, _ in chosen}, {reader for _, reader in chosen}
        best = max(candidates, key=lambda p: (len(_facts(p) & missing), (p[0] in writers) + (p[1] in readers)))
        chosen.append(best)
        missing -= _facts(best)
    return chosen


def _facts(pair: Pair) -> set[tuple[object, object]]:
    writer, reader = pair
    return {
        *(("written by", writer.wrapper), ("read by", reader.wrapper)),
        *(("written on", (writer.ranks, writer.tp)), ("read on", (reader.ranks, reader.tp))),
        *(("cut", (writer.tp, reader.tp)), ("more ranks", writer.ranks < reader.ranks)),
    }


EXPERT_SITES = [
    Site("ddp", 1, ep=1),
    Site("fsdp2", 2, 2, ep=2, etp=1),
    Site("zero3", 4, ep=2),
    Site("zero1", 4, 2, ep=2),
    Site("zero2", 4, ep=4),
    Site("ddp", 4, ep=2, etp=2),
    *(Site("hybrid zero2", 4, ep=2), Site("hybrid", 4, ep=2), Site("fsdp2", 4, ep=2)),
    *(Site("fsdp2", 2, ep=2), Site("zero3", 2, ep=2)),
]
"""Of which the first are compared each time."""


PIPELINE_SITES = [
    Site("ddp", 1, pp=1),
    Site("zero1", 2, pp=2, vpp=2),
    Site("fsdp2", 4, 2, pp=2),
    Site("zero2", 4, pp=4),
    *(Site("zero3", 4, pp=2), Site("hybrid", 4, pp=2, vpp=2), Site("fsdp2", 2, pp=2), Site("zero3", 2, pp=1)),
]


def _circle(sites: Sequence[Site]) -> list[Pair]:
    """Returns pairs in which each layout writes for the next, round in a circle."""
    return list(zip(sites, [*sites[1:], sites[0]], strict=True))


@pytest.mark.parametrize(
    ("pairs", "tied"),
    [
        pytest.param(_pairwise, True, id="every wrapper and cut"),
        pytest.param(lambda: _circle(EXPERT_SITES[:5]), True, id="experts"),
        pytest.param(lambda: _circle(PIPELINE_SITES[:4]), True, id="pipeline stages"),
        pytest.param(lambda: _circle(PIPELINE_SITES), False, id="untied pipeline stages", marks=pytest.mark.long),
    ],
)
def test_each_site_reads_what_others_wrote(tmp_path: Path, pairs: Callable[[], list[Pair]], tied: bool) -> None:
    problems = _problems_of(pairs(), tied, tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("sites", "tied"),
    [(SITES, True), (SITES, False), (EXPERT_SITES, False), (PIPELINE_SITES, True)],
    ids=["tied", "untied", "experts", "pipeline stages"],
)
def test_every_site_reads_what_every_other_wrote(tmp_path: Path, sites: list[Site], tied: bool) -> None:
    problems = _problems_of([*itertools.product(sites, sites)], tied, tmp_path)
    assert not problems, "\n".join(problems)


SYMPTOMS = {
    "last bit": "1 tensors have other contents",
    "step count": "'step': 1",
    "swapped moments": "2 tensors have",
}


def test_the_comparison_sees_planted_faults(tmp_path: Path) -> None:
    problems = _problems_of([(Site("zero1", 2), Site("fsdp2", 4, 2))], False, tmp_path, list(SYMPTOMS))
    for fault, symptom in SYMPTOMS.items():
        assert any(fault in problem and symptom in problem for problem in problems), problems
