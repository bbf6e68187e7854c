"""A module that does nothing, for submodules that a spec leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class IdentityOp(nn.Module):
    """Takes any arguments in its constructor, and returns its first input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns `input_`, unchanged."""
        return input_
