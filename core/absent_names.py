"""Names that Megatron-LM has and this project does not: importing one, or calling it, says where the thing is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn


def absent_names(module: str, remedies: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Returns a module's ``__getattr__``: an ImportError with a remedy for the names given, else Python's usual error.

    In a package a name may be a module's, which cannot be imported by its path either.

    Args:
        module: its ``__name__``.
        remedies: by Megatron-LM's name, what to use here.
    """

    def getattribute(name: str) -> NoReturn:
        if name in remedies:
            # Not an AttributeError: `from module import name` would replace that by its own message.
            raise ImportError(f"{module} has no {name}: {remedies[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    getattribute.remedies = remedies  # type: ignore[attr-defined]  # for the page that lists them
    return getattribute


def absent_method(name: str, remedy: str) -> Callable[..., NoReturn]:
    """Returns a method that Megatron-LM's class of this name has: an AttributeError with a remedy, when it is
    called."""

    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} has no {name}: {remedy}", name=name, obj=self)

    method.__name__ = name
    method.__doc__ = f"Megatron-LM's, absent here: {remedy}."
    return method


MODEL_STATE_DICT = "core.dist_checkpointing.model_state_dict(module) has tensors and DTensors of the whole model"
"""For `absent_method` of modules that Megatron-LM describes by a ``sharded_state_dict``."""


class _AbsentModules(MetaPathFinder):
    """Asked last, for modules of this project that nothing has found: says what `absent_names` says of them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] != __package__:
            return
        remedy = getattr(getattr(sys.modules.get(package), "__getattr__", None), "remedies", {}).get(name)
        if remedy is not None:
            raise ModuleNotFoundError(f"{package} has no {name}: {remedy}", name=package)


sys.meta_path.append(_AbsentModules())
