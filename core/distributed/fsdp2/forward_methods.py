"""Methods other than `forward` that need gathered parameters, as `generate` or `encode_image`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ...errors import WrapError
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
    modules = list(dict.fromkeys([root, *members]))
    for name in names:
        holders = [module for module in modules if callable(getattr(module, name, None))]
        if not holders:
            kinds = sorted({type(module).__name__.removeprefix("FSDP") for module in modules})
            raise WrapError(
                f"forward_methods names {name!r}, which is a method of neither the model nor its units "
                f"({', '.join(kinds)}); name methods of these, and classes that have it in sub_modules_to_wrap"
            )
        for module in holders:
            register_fsdp_forward_method(module, name)
            setattr(module, name, _freeing(root, getattr(module, name), prepare, free))


def _freeing(
    root: nn.Module, method: Callable[..., Any], prepare: Callable[[], None], free: Callable[[], None]
) -> Callable[..., Any]:
    """With no backward to follow, frees gathered parameters; otherwise the next forward would read stale weights."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        prepare()
        output = method(*args, **kwargs)
        if not torch.is_grad_enabled() and not is_in_forward(root):
            free()
        return output

    return called
