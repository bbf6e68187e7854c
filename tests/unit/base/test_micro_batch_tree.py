"""The tree of a global batch is the same on any ranks: checked on the shapes of sums, written out."""

from __future__ import annotations

import pytest

from core.base.micro_batch_tree import MicroBatchTree, odd_part, rank_counts

Node = tuple | int
"""A sum: the two sums that were added; or the index of a micro-batch."""


def _sum_on_ranks(tree: MicroBatchTree, count: int) -> tuple[Node, int]:
    """Returns the shape of the sum that a wrapper forms by the rules of `tree`, and the most sums that waited at a
    time."""
    of_ranks: list[list[Node]] = [[] for _ in range(tree.num_ranks)]
    current: list[Node | None] = [None] * tree.num_ranks
    shards: list[Node] = []
    shard: Node | None = None
    most = 0
    for number in range(count):
        additions = tree.additions(number, count)
        if additions is not None and tree.interleaves:
            shard = _set_aside(shards, shard, additions)
        for rank in range(tree.num_ranks):
            if additions is not None and not tree.interleaves:
                current[rank] = _set_aside(of_ranks[rank], current[rank], additions)
            leaf = tree.index(rank, number, count)
            current[rank] = leaf if current[rank] is None else (current[rank], leaf)
        most = max(most, len(shards), *map(len, of_ranks))
        if tree.reduces(number, count):
            sums = [_with_older(waiting, total) for waiting, total in zip(of_ranks, current, strict=True)]
            reduced = _added_in_pairs(sums)
            shard = reduced if shard is None else (shard, reduced)
            current = [None] * tree.num_ranks
    return _with_older(shards, shard), most


def _set_aside(waiting: list[Node], total: Node | None, additions: int) -> None:
    for _ in range(additions):
        total = (waiting.pop(), total)
    waiting.append(total)


def _with_older(waiting: list[Node], total: Node | None) -> Node:
    while waiting:
        total = (waiting.pop(), total)
    return total


def _added_in_pairs(sums: list[Node]) -> Node:
    while len(sums) > 1:
        sums = list(zip(sums[::2], sums[1::2], strict=True))
    return sums[0]


def _tree(first: int, last: int, odd: int) -> Node:
    """Adds chunks of `odd` in order, then pairs: the definition."""
    if last - first == odd:
        total: Node = first
        for leaf in range(first + 1, last):
            total = (total, leaf)
        return total
    middle = (first + last) // 2
    return _tree(first, middle, odd), _tree(middle, last, odd)


@pytest.mark.parametrize("interleaves", [False, True], ids=["blocks", "interleaved"])
@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 48, 64])
def test_any_number_of_ranks_adds_up_one_tree(batches: int, interleaves: bool):
    expected = _tree(0, batches, odd_part(batches))
    for ranks in rank_counts(batches):
        tree, count = MicroBatchTree(ranks, interleaves), batches // ranks
        found, most = _sum_on_ranks(tree, count)
        assert found == expected
        assert most == tree.num_set_aside(count)


@pytest.mark.parametrize("interleaves", [False, True], ids=["blocks", "interleaved"])
def test_ranks_share_all_micro_batches(interleaves: bool):
    tree = MicroBatchTree(4, interleaves)
    assert sorted(tree.index(rank, number, 6) for rank in range(4) for number in range(6)) == list(range(24))


def test_rank_counts_are_the_powers_of_two_that_divide():
    assert [rank_counts(n) for n in (1, 3, 8, 12)] == [[1], [1], [1, 2, 4, 8], [1, 2, 4]]
    with pytest.raises(ValueError, match="3 ranks are no power of two"):
        MicroBatchTree(3)
