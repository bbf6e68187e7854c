"""Keeps custom attributes of parameters, which torch drops when it replaces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def parameter_attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restores, by name, the custom attributes of parameters that are replaced inside.

    FSDP2, ``to_empty``, ``.to(dtype)`` of sharded modules and ``assign=True`` build new parameters without Megatron's
    ``tensor_model_parallel``, ``partition_dim``, ``sequence_parallel`` and other attributes.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in attributes.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
