"""For tests of process groups: worlds of any size in one process, and the expected groups.

The oracle is written from the semantics alone: a rank is a number in mixed radix whose first digit is the leftmost
token of the order, and a group holds the ranks that agree in every digit that it does not run along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from core import parallel_state

Digits = dict[str, int]


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process one rank of a world whose collectives do nothing."""
    hook = sys.excepthook  # torch wraps it once more at each initialisation
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook


class Factorisation:
    """A world of ranks cut by `sizes` in the given order."""

    def __init__(self, order: str, sizes: Mapping[str, int]) -> None:
        self.digits: list[Digits] = []
        world_size = 1
        for size in sizes.values():
            world_size *= size
        for number in range(world_size):
            digits = {}
            for token in order.split("-"):
                number, digits[token] = divmod(number, sizes[token])
            self.digits.append(digits)

    def group(self, rank: int, along: str) -> list[int]:
        """Returns the ranks that differ from `rank` only along the tokens of `along`, ascending."""
        tokens = along.split("-")
        return [
            other
            for other, digits in enumerate(self.digits)
            if all(digits[token] == digit for token, digit in self.digits[rank].items() if token not in tokens)
        ]

    def table(self, along: str) -> set[tuple[int, ...]]:
        return {tuple(self.group(rank, along)) for rank in range(len(self.digits))}
