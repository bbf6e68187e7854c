"""Functions of tensors that torch's compiler makes one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import compile_variants, missing_compiler
from .errors import warn_once
from .text import first_line

COMPILED_ON = ["cuda"]
"""Device types to compile on. On a CPU a part of a tensor stays in the cache between operations, and compiling takes
seconds."""


_MOST_VARIANTS = 64
"""Compilations of one function, for dtypes, widths, and tensors of one row: those of several models add up."""


class Fused:
    """A function of a tensor and of others, compiled on a GPU and called directly elsewhere.

    One compilation serves every number of rows; each number of columns of a matrix has its own, so that its kernels
    read whole words. If torch cannot compile here, warns once and calls the function directly.

    Args:
        function: ``(tensor, *others) -> results``, of tensors, None and flags; may write to tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # The compiled function. The first call on a GPU sets it, for all later ones.
        self._compiled_function: Callable[..., Any] | None = None
        # Whether torch cannot compile on this machine. The first call that fails sets it, so that no other one tries.
        self._cannot_compile = False

    def compiles_on(self, device: torch.device) -> bool:
        """Returns whether a call with tensors on `device` is compiled, as far as is known."""
        return device.type in COMPILED_ON and not self._cannot_compile

    def __call__(self, first: Tensor, *others: Any) -> Any:
        is_traced = torch.compiler.is_compiling()  # the enclosing function's compiler compiles this too
        if is_traced or not self.compiles_on(first.device):
            return self.function(first, *others)
        if self._compiled_function is None:
            self._compiled_function = compile_variants(self.function, _MOST_VARIANTS)
        if first.ndim > 1:
            torch._dynamo.mark_static(first, 1)
        try:
            return self._compiled_function(first, *others)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # which the user's settings of torch ask for
            raise
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything ran
            self._cannot_compile = True
            cause, remedy = missing_compiler(error) or (first_line(error), "")
            warn_once(
                f"torch cannot compile for {first.device.type} ({cause}): losses and updates read and write memory "
                f"several times where they would once{'; ' * bool(remedy)}{remedy}"
            )
            return self.function(first, *others)
