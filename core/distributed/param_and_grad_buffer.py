"""Megatron-LM's path of the buffers, which are in `buffers`."""

from __future__ import annotations

from .buffers.param_and_grad_buffer import ParamAndGradBuffer

__all__ = ["ParamAndGradBuffer"]
