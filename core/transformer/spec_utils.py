"""Which classes a model is made of, as data: Megatron-LM's module specs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError

Builder = Callable[..., Any]
"""A class, or a function that returns a module."""


@dataclass
class ModuleSpec:
    """A module before it is built."""

    module: Builder | tuple[str, str]
    """Its class, or where to import that from: (module, name)."""

    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the constructor, next to those that the enclosing module gives."""

    submodules: Any = None
    """What the constructor gets as `submodules`, where not None."""

    metainfo: dict[str, Any] = field(default_factory=dict)
    """Notes of the script; nothing here reads them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """:func:`build_module` of this."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Builder:
    """The class at (module, name).

    Raises:
        ConfigError: there is none.
    """
    path, name = module_path
    try:
        found: Builder = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"a ModuleSpec names {name} of {path}, which cannot be imported: {error}") from error
    return found


def build_module(spec_or_module: ModuleSpec | Builder, *args: Any, **kwargs: Any) -> Any:
    """Builds what a spec, a class or a function says, with these arguments and the spec's own.

    Raises:
        ConfigError: something else was given.
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
