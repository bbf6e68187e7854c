"""Re-exports the buffers under Megatron-LM's path."""

from __future__ import annotations

from .buffers.param_and_grad_buffer import ParamAndGradBuffer

__all__ = ["ParamAndGradBuffer"]
