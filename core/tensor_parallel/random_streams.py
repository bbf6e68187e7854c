"""Seeds all random streams of a rank, packs their states into one row of bytes, and unpacks them.

Streams belong to ranks: they continue only on the same number of ranks. Those of a micro-batch depend on its index in
the run, and not on the rank that runs it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import device
from ..dist_checkpointing.format.content_hash import splitmix64
from .random import get_rng_tracker, model_parallel_manual_seed


def rng_state() -> dict[str, torch.Tensor]:
    """Returns the state of every random stream of this rank, as byte tensors on the CPU."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    streams = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers], dtype=torch.int64).view(torch.uint8),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64).view(torch.uint8),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64).view(torch.uint8),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64).view(torch.uint8),
    }
    if device.device_type() == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams | {f"tracked.{name}": value for name, value in sorted(get_rng_tracker().get_states().items())}


def set_rng_state(streams: Mapping[str, torch.Tensor]) -> None:
    """Restores every stream from :func:`rng_state`."""
    torch.set_rng_state(streams["torch"])
    version, *numbers = streams["python"].view(torch.int64).tolist()
    has_gauss, gauss = streams["python_gauss"].view(torch.float64).tolist()
    random.setstate((version, tuple(numbers), gauss if has_gauss else None))
    *keys, position, has_cached = streams["numpy"].view(torch.int64).tolist()
    cached = streams["numpy_gauss"].view(torch.float64).item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_cached, cached))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
    tracked = {name.removeprefix("tracked."): v for name, v in streams.items() if name.startswith("tracked.")}
    get_rng_tracker().set_states(tracked)


def rng_layout(streams: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Returns the name and number of bytes of each stream, in the order of :func:`pack`."""
    return [[name, value.numel()] for name, value in streams.items()]


def pack(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Joins all streams into one row of bytes."""
    return torch.cat([value.flatten() for value in streams.values()])


def unpack(packed: torch.Tensor, layout: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Splits a row of bytes into the streams that :func:`pack` joined."""
    pieces = packed.split([size for _, size in layout])
    return {name: piece.clone() for (name, _), piece in zip(layout, pieces, strict=True)}


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
        seed_everything(splitmix64(self.first + index + 1, self.seed) >> 16)  # 48 bits


def seed_everything(seed: int) -> None:
    """Seeds torch, the tensor-parallel streams, numpy and Python; the ranks of one model pass the same seed."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    model_parallel_manual_seed(seed)
