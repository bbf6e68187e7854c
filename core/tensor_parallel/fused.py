"""Compiles chains of elementwise operations for a GPU, where each would read and write all elements in its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch_compat import missing_compiler
from ..errors import warn_once

_COMPILED_ON = ["cuda"]
"""Kinds of devices. On a CPU a part of a matrix stays in the cache between operations, and compiling takes seconds."""


class Fused:
    """A function of a matrix and of vectors over its rows, compiled on a GPU and called directly elsewhere.

    One compilation serves every number of rows; each number of columns has its own, so that its kernels read whole
    words. If torch cannot compile here, warns once and calls the function directly.

    Args:
        function: `(matrix, *vectors) -> tensors`; may write to the matrix.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # The compiled function. The first call on a GPU sets it; never cleared.
        self._compiled: Callable[..., Any] | None = None
        # Whether torch cannot compile on this machine. The first call that fails sets it; never cleared.
        self._cannot_compile = False

    def __call__(self, matrix: torch.Tensor, *vectors: torch.Tensor) -> Any:
        is_traced = torch.compiler.is_compiling()  # the compiler of what is around it takes this too
        if is_traced or self._cannot_compile or matrix.device.type not in _COMPILED_ON:
            return self.function(matrix, *vectors)
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True)
        torch._dynamo.mark_static(matrix, 1)
        try:
            return self._compiled(matrix, *vectors)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything ran
            self._cannot_compile = True
            said, remedy = missing_compiler(error) or (next(iter(str(error).splitlines()), type(error).__name__), "")
            warn_once(
                f"torch cannot compile for {matrix.device.type} ({said}): the loss in parts reads and writes its "
                f"logits about ten times as often{'; ' * bool(remedy)}{remedy}"
            )
            return self.function(matrix, *vectors)
