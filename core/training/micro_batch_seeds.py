"""Random streams of a micro-batch, which depend on its index in the run and not on the rank that runs it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ..tensor_parallel.random import model_parallel_manual_seed

_GOLDEN = 0x9E3779B97F4A7C15
_NUMPY_SEEDS = 1 << 32


@dataclass(frozen=True)
class MicroBatchSeeds:
    """The seeds of one step."""

    seed: int
    """Of the run."""
    first: int
    """Index, in the run, of the step's first micro-batch."""

    def enter(self, index: int) -> None:
        """Seeds every stream of this rank for the step's micro-batch `index`, as `seed_everything` does for a run."""
        seed_everything(_mixed(self.seed, self.first + index))


def seed_everything(seed: int) -> None:
    """Seeds torch, the tensor-parallel streams, numpy and Python; the ranks of one model pass the same seed."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    model_parallel_manual_seed(seed)


def _mixed(seed: int, index: int) -> int:
    """Returns 48 bits of SplitMix64 (Steele, Lea and Flood, 2014), whose stream a seed begins."""
    x = (seed + (index + 1) * _GOLDEN) % (1 << 64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % (1 << 64)
    return (x ^ (x >> 31)) >> 16
