"""Makes names of Megatron-LM that this project does not have raise an error with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn


def absent_names(
    module: str,
    remedies: Mapping[str, str],
    *,
    imported: Mapping[str, str] = MappingProxyType({}),
    functions_import: bool = False,
) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which raises an ImportError with a remedy, or else Python's usual error.

    In a package a name may also be a module's: importing it by its path raises the same.

    Args:
        module: the module's ``__name__``.
        remedies: remedies by Megatron-LM's name.
        imported: modules by the name that is imported from them when it is first used.
        functions_import: functions, whose names have no capitals, can be imported and raise when they are called, so
            that a file is not lost because of one name that it seldom calls.
    """

    def getattribute(name: str) -> Any:
        if name in imported:
            return getattr(import_module(imported[name]), name)
        if name not in remedies:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module} has no {name}: {remedies[name]}"
        if functions_import and name.islower():
            return partial(_raise_at_call, message)
        # Not an AttributeError: `from module import name` would replace that by its own message.
        raise ImportError(message, name=module)

    getattribute.remedies = remedies  # type: ignore[attr-defined]  # for the page that lists them
    return getattribute


def _raise_at_call(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(message)


def absent_method(name: str, remedy: str) -> Callable[..., NoReturn]:
    """Returns a method that Megatron-LM's class of this name has: an AttributeError with a remedy, when it is
    called."""

    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} has no {name}: {remedy}", name=name, obj=self)

    method.__name__ = name
    method.__doc__ = f"Megatron-LM's, absent here: {remedy}."
    return method


class _AbsentModules(MetaPathFinder):
    """The last import finder: raises the remedy of `absent_names` for modules of this project that do not exist."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] != __package__:
            return
        remedy = getattr(getattr(sys.modules.get(package), "__getattr__", None), "remedies", {}).get(name)
        if remedy is not None:
            raise ModuleNotFoundError(f"{package} has no {name}: {remedy}", name=package)


sys.meta_path.append(_AbsentModules())
