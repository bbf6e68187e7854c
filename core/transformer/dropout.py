"""Dropout of activations, with the random stream that tensor-parallel ranks share or do not share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..tensor_parallel.random import get_rng_tracker


def hidden_dropout(input_: torch.Tensor, p: float, *, training: bool, sequence_parallel: bool) -> torch.Tensor:
    """Dropout of a residual stream `[s, b, h]`, or of this rank's part of the sequence `[s / tp, b, h]`.

    Tensor-parallel ranks that hold the same activations drop the same elements of them; ranks that hold parts of
    the sequence each draw from a stream of their own.
    """
    if p == 0.0 or not training:
        return input_
    if not sequence_parallel:
        return F.dropout(input_, p)
    with get_rng_tracker().fork():
        return F.dropout(input_, p)
