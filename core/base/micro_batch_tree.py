"""Which micro-batches of a global batch are added first, on any number of ranks.

The micro-batches of a step are the leaves of a tree, by their index in the global batch. Of ``N = 2^k x odd`` each
chunk of `odd` neighbours is added in order; the `2^k` sums are added in pairs, and the sums of these, up to the root.
Floating-point addition commutes, so that each node has one value, however ranks share the work. A rank has
``N / ranks`` micro-batches, for any power of two that divides `2^k`:

* contiguous blocks of the index make ranks the upper levels: a rank adds up its own subtree, and ranks add once;
* interleaved chunks make ranks the lower levels: ranks add after each chunk, and a rank adds up what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass


def odd_part(number: int) -> int:
    """Returns the largest odd divisor."""
    return number // (number & -number)


def rank_counts(num_micro_batches: int) -> list[int]:
    """Returns the numbers of data-parallel ranks on which a global batch has the same sum: powers of two."""
    most = num_micro_batches // odd_part(num_micro_batches)
    return [1 << power for power in range(most.bit_length())]


@dataclass(frozen=True)
class MicroBatchTree:
    """The part of the tree that a rank adds up. `count` is its number of micro-batches in a step.

    Raises:
        ValueError: the number of ranks is no power of two.
    """

    num_ranks: int
    """Data-parallel ranks."""
    interleaves: bool = False
    """Ranks are the lower levels of the tree: each chunk of a rank is reduced by itself."""

    def __post_init__(self) -> None:
        if odd_part(self.num_ranks) != 1:
            raise ValueError(f"{self.num_ranks} ranks are no power of two")

    def index(self, rank: int, number: int, count: int) -> int:
        """Returns the index, in the global batch, of a rank's micro-batch `number`, which counts from 0."""
        if not self.interleaves:
            return rank * count + number
        chunk, place = divmod(number, odd_part(count))
        return (chunk * self.num_ranks + rank) * odd_part(count) + place

    def reduces(self, number: int, count: int) -> bool:
        """Returns whether ranks add up their gradients after micro-batch `number`."""
        return number == count - 1 or (self.interleaves and (number + 1) % odd_part(count) == 0)

    def additions(self, number: int, count: int) -> int | None:
        """Returns how many partial sums are added to the current sum when it is set aside before a micro-batch.

        None if it is not set aside before micro-batch `number`.

        The current sum is the one accumulated in place: of micro-batches' gradients, or of shards if `interleaves`.
        Partial sums behave like the digits of a binary counter.
        """
        run = self._run(count)
        if number == 0 or number % run:
            return None
        pairs_before = number // run - 1
        return (~pairs_before & (pairs_before + 1)).bit_length() - 1

    def num_set_aside(self, count: int) -> int:
        """Returns the largest number of partial sums at one time, without the current sum."""
        return (count // self._run(count)).bit_length() - 1

    def _run(self, count: int) -> int:
        """Micro-batches that add up in place: a chunk, or two neighbours, where each is one value."""
        odd = odd_part(count)
        pairs = 2 if count > odd else 1
        if self.interleaves:
            return odd * pairs
        return odd if odd > 1 else pairs
