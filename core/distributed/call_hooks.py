"""What wrappers put around calls of modules, of `forward` and of other methods, in either engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class WrapperHook:
    """A hook that a wrapper puts on modules. In a copied or pickled module, which no wrapper trains, it does nothing.

    Args:
        call: the hook itself.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        # Fixed: it leads to the wrapper, whose process groups can neither be copied nor pickled.
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return WrapperHook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def enclose(
    method: Callable[..., Any], before: Callable[[Any, Any, Any], Any], after: Callable[[Any, Any, Any], Any]
) -> Callable[..., Any]:
    """Returns a method of a module with the work of hooks of its forward around it.

    Args:
        before: as a forward pre-hook with keyword arguments, without the module. Returns other arguments, or None.
        after: as a forward hook that is always called, with None for the output of a method that raised.
    """

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(None, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            changed = after(None, args, output)
        return output if changed is None else changed

    return called


def watch_outputs(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Makes backward call `hook` with the gradient of each tensor in `output`, when it reaches one."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(hook)
