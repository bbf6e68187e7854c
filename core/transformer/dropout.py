"""Dropout of activations, with the random stream that the ranks of a model share or do not share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import parallel_state
from ..tensor_parallel.random import CONTEXT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker


def hidden_dropout(input_: torch.Tensor, p: float, *, training: bool, sequence_parallel: bool) -> torch.Tensor:
    """Dropout of a residual stream `[s, b, h]`, or of this rank's part of the sequence `[s / tp, b, h]`.

    Tensor-parallel ranks that hold the same activations drop the same elements of them; ranks that hold parts of
    the sequence, by sequence or context parallelism, each draw from a stream of their own.
    """
    if p == 0.0 or not training:
        return input_
    if not sequence_parallel and parallel_state.get_context_parallel_world_size() == 1:
        return F.dropout(input_, p)
    with get_rng_tracker().fork(MODEL_PARALLEL_RNG if sequence_parallel else CONTEXT_PARALLEL_RNG):
        return F.dropout(input_, p)
