"""Dropout of activations, from the random stream that ranks of a model share, or from their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import parallel_state
from ..tensor_parallel.random import CONTEXT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker


def hidden_dropout(input_: torch.Tensor, p: float, *, training: bool, sequence_parallel: bool) -> torch.Tensor:
    """Applies dropout to a residual stream `[s, b, h]`, or to this rank's part of the sequence `[s / tp, b, h]`.

    Tensor-parallel ranks with the same activations drop the same elements; ranks with parts of the sequence, by
    sequence or context parallelism, draw from their own streams.
    """
    if p == 0.0 or not training:
        return input_
    if not sequence_parallel and parallel_state.get_context_parallel_world_size() == 1:
        return F.dropout(input_, p)
    with get_rng_tracker().fork(MODEL_PARALLEL_RNG if sequence_parallel else CONTEXT_PARALLEL_RNG):
        return F.dropout(input_, p)
