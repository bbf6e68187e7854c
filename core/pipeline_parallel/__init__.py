"""Runs the micro-batches of a step, for models of one pipeline stage."""

from ..absent_names import absent_names
from .schedules import forward_backward_no_pipelining, get_forward_backward_func

__all__ = ["forward_backward_no_pipelining", "get_forward_backward_func"]

_ONE_STAGE = "models here have one pipeline stage; get_forward_backward_func"

__getattr__ = absent_names(
    __name__,
    dict.fromkeys(("p2p_communication", "combined_1f1b", "bridge_communicator", "P2PCommunicator"), _ONE_STAGE),
)
