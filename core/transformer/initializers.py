"""How weights start: functions that fill a whole-model tensor, from a generator if they are given one.

`core.tensor_parallel.initialization` calls them, one parameter at a time, with a generator seeded by the name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Normal:
    """Fills with draws from N(0, sigma^2). Equal ones are equal, also across processes."""

    sigma: float

    def __call__(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Fills `tensor` in place, from torch's default generator where none is given, and returns it."""
        return torch.nn.init.normal_(tensor, 0.0, self.sigma, generator)


def init_method_normal(sigma: float) -> Normal:
    """Draws from N(0, sigma^2)."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Draws from N(0, sigma^2 / (multiplier x num_layers)), for weights that write to the residual stream.

    With 2, the branches of a layer, the variance of a sum over all branches stays sigma^2.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def init_ones(tensor: torch.Tensor) -> None:
    """Fills with ones."""
    tensor.fill_(1.0)


def init_zeros(tensor: torch.Tensor) -> None:
    """Fills with zeros."""
    tensor.zero_()
