"""How weights start: functions that fill a whole-model tensor from a generator.

`core.tensor_parallel.initialization` calls them, one parameter at a time, with a generator seeded by the name.
"""

from __future__ import annotations

import math

import torch

from ..tensor_parallel.initialization import Initializer


def init_method_normal(sigma: float) -> Initializer:
    """Draws from N(0, sigma^2)."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, sigma, generator=generator)

    return fill


def scaled_init_method_normal(sigma: float, num_layers: int) -> Initializer:
    """Draws from N(0, sigma^2 / (2 x num_layers)): the variance of a sum over all residual branches stays sigma^2."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_ones(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fills with ones; takes a generator as every initializer does."""
    tensor.fill_(1.0)


def init_zeros(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fills with zeros."""
    tensor.zero_()
