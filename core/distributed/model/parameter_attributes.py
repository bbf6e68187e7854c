"""Keeps custom attributes and hooks of parameters, which torch drops when it replaces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Torch's dicts of a tensor's hooks; None where there are none. The handle of a hook removes it from its dict."""


@contextmanager
def parameter_attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restores, by name, the custom attributes and the hooks of parameters that are replaced inside.

    FSDP2, ``to_empty``, ``.to(dtype)`` of sharded modules and ``assign=True`` build new parameters without Megatron's
    ``tensor_model_parallel``, ``partition_dim``, ``sequence_parallel`` and other attributes.
    """
    attributes = {
        name: vars(parameter) | {key: hooks for key in _HOOKS if (hooks := getattr(parameter, key)) is not None}
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in attributes.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
