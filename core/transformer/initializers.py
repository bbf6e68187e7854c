"""Initializers: functions that fill a whole-model tensor, from a generator if one is given.

`core.tensor_parallel.initialization` calls them, one parameter at a time, with a generator seeded by the name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Normal:
    """Fills with draws from N(0, sigma^2). Instances with the same sigma compare equal, also across processes."""

    sigma: float

    def __call__(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Fills `tensor` in place, by default from torch's default generator, and returns it."""
        return torch.nn.init.normal_(tensor, 0.0, self.sigma, generator)


def init_method_normal(sigma: float) -> Normal:
    """Returns an initializer that draws from N(0, sigma^2)."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Returns an initializer that draws from N(0, sigma^2 / (multiplier x num_layers)), for output projections.

    With 2, the branches of a layer, a sum over all branches of the residual stream has variance sigma^2.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def init_ones(tensor: torch.Tensor) -> None:
    """Fills with ones."""
    tensor.fill_(1.0)


def init_zeros(tensor: torch.Tensor) -> None:
    """Fills with zeros."""
    tensor.zero_()
