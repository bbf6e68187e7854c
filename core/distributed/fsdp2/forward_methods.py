"""Gathers parameters around methods other than `forward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ..model.forward_methods import find_forward_methods
from .torch_private import is_in_forward


def register_forward_methods(
    root: nn.Module,
    members: Iterable[nn.Module],
    names: Sequence[str],
    *,
    prepare: Callable[[], None],
    free: Callable[[], None],
) -> None:
    """Gathers parameters around the named methods of the sharded root and of its units, and frees them after.

    They are called on the wrapped model: ``model.module.generate(...)``. Every rank must call them, as `forward`.

    Args:
        members: the modules of the units.
        prepare: called before each, as before a forward.
        free: frees what stays gathered, after a call that no backward follows.

    Raises:
        WrapError: a name that neither the root nor a unit has as a method.
    """
    for module, found in find_forward_methods(root, members, names).items():
        for name in found:
            register_fsdp_forward_method(module, name)
            setattr(module, name, _freeing(root, getattr(module, name), prepare, free))


def _freeing(
    root: nn.Module, method: Callable[..., Any], prepare: Callable[[], None], free: Callable[[], None]
) -> Callable[..., Any]:
    """Frees gathered parameters if no backward follows; otherwise the next forward would read stale weights."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        prepare()
        output = method(*args, **kwargs)
        if not torch.is_grad_enabled() and not is_in_forward(root):
            free()
        return output

    return called
