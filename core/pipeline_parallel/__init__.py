"""Runs the micro-batches of a step, over one pipeline stage or several."""

from ..base.megatron_names import absent_names
from .schedules import (
    forward_backward,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)

__all__ = [
    "forward_backward",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
]


__getattr__ = absent_names(__name__)
