"""The random streams of a rank: torch's, Python's, numpy's, and those that a tracker of a model's layers keeps.

`packed_rng_state` joins them in one row of bytes. Streams belong to ranks: they continue only on the same number of
ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from .device import device_type
from .recomputation import set_tracked, tracked_streams


def _streams() -> dict[str, torch.Tensor]:
    """Returns the state of every random stream of this rank, as byte tensors on the CPU."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, next_gauss = np.random.get_state(legacy=True)
    streams = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers], dtype=torch.int64).view(torch.uint8),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64).view(torch.uint8),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64).view(torch.uint8),
        "numpy_gauss": torch.tensor([next_gauss], dtype=torch.float64).view(torch.uint8),
    }
    if device_type() == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams | {f"tracked.{name}": value for name, value in sorted(tracked_streams.items())}


def packed_rng_state() -> torch.Tensor:
    """Returns the state of all streams as one row of bytes, whose length says which streams this rank has."""
    return torch.cat([value.flatten() for value in _streams().values()])


def set_packed_rng_state(state: torch.Tensor) -> None:
    """Restores every stream from :func:`packed_rng_state` of a rank with the same streams."""
    sizes = {name: value.numel() for name, value in _streams().items()}
    pieces = state.split(list(sizes.values()))
    streams = {name: piece.clone() for name, piece in zip(sizes, pieces, strict=True)}
    torch.set_rng_state(streams["torch"])
    version, *numbers = streams["python"].view(torch.int64).tolist()
    has_gauss, gauss = streams["python_gauss"].view(torch.float64).tolist()
    random.setstate((version, tuple(numbers), gauss if has_gauss else None))
    *keys, position, has_cached = streams["numpy"].view(torch.int64).tolist()
    next_gauss = streams["numpy_gauss"].view(torch.float64).item()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_cached, next_gauss))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
    set_tracked({n.removeprefix("tracked."): state for n, state in streams.items() if n.startswith("tracked.")})
