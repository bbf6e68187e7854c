"""Custom attributes of parameters, which torch drops where it replaces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def parameter_attributes_kept(module: nn.Module) -> Iterator[None]:
    """Puts back, by name, the custom attributes that parameters lose when something replaces them inside.

    FSDP2 builds new parameters, as do ``to_empty``, ``.to(dtype)`` of sharded modules and ``assign=True``; torch drops
    Megatron's ``tensor_model_parallel``, ``partition_dim``, ``sequence_parallel`` and the like on the way.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in attributes.get(name, {}).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
