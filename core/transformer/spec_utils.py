"""Megatron-LM's module specs: the classes of a model as data, and the module that does nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ..base.errors import ConfigError

Builder = Callable[..., Any]
"""A class, or a function that returns a module."""


@dataclass
class ModuleSpec:
    """The class and arguments of a module to build."""

    module: Builder | tuple[str, str]
    """The module's class, or the place to import it from: (module, name)."""

    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the constructor, in addition to those that the enclosing module passes."""

    submodules: Any = None
    """The constructor's argument `submodules`, if not None."""

    metainfo: dict[str, Any] = field(default_factory=dict)
    """Notes of the script, which nothing here reads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the module, see :func:`build_module`."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Builder:
    """Imports the class at (module, name).

    Raises:
        ConfigError: it cannot be imported.
    """
    path, name = module_path
    try:
        return cast(Builder, getattr(importlib.import_module(path), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"a ModuleSpec names {name} of {path}, which cannot be imported: {error}") from error


def build_module(spec_or_module: ModuleSpec | Builder, *args: Any, **kwargs: Any) -> Any:
    """Builds a module from a spec, a class or a function, with these arguments and the spec's.

    Raises:
        ConfigError: `spec_or_module` is none of these.
    """
    if isinstance(spec_or_module, ModuleSpec):
        spec = spec_or_module
        builder = import_module(spec.module) if isinstance(spec.module, tuple) else spec.module
        kwargs = spec.params | kwargs
        if spec.submodules is not None:
            kwargs["submodules"] = spec.submodules
        return builder(*args, **kwargs)
    if not callable(spec_or_module):
        raise ConfigError(f"a module's spec is {spec_or_module!r}; it takes a ModuleSpec or a class")
    return spec_or_module(*args, **kwargs)


class IdentityOp(nn.Module):
    """Takes any arguments in its constructor, and returns its first input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns `input_`, unchanged."""
        return input_
