"""Runs the micro-batches of a step, for models of one pipeline stage."""

from ..base.megatron_names import absent_names
from .schedules import forward_backward_no_pipelining, get_forward_backward_func

__all__ = ["forward_backward_no_pipelining", "get_forward_backward_func"]


__getattr__ = absent_names(__name__)
