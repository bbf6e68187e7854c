"""Finds module classes by their dotted names, and checks that a model contains them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from types import ModuleType

from torch import nn

from ...errors import WrapError
from ...text import choices


def import_classes_from_paths(class_paths: Iterable[str | type[nn.Module]]) -> list[type[nn.Module]]:
    """Returns the module classes of these dotted paths, as ``"torch.nn.Linear"``; a class is taken as it is.

    Raises:
        WrapError: a path that does not import, or is not that of a module class; it names the path, what the module
            has, and the nearest name.
    """
    if isinstance(class_paths, str):
        raise WrapError(f"class paths are given as a list of dotted paths, and got the string {class_paths!r}")
    return [path if isinstance(path, type) else _import_class(path) for path in class_paths]


def check_classes_are_in(model: nn.Module, classes: Sequence[type[nn.Module]], asked_by: str) -> None:
    """Raises unless the model has a module of each of these classes.

    Args:
        asked_by: the setting that named them.

    Raises:
        WrapError: naming the class, the classes that the model has, and the nearest of them.
    """
    for asked in classes:
        if not any(isinstance(module, asked) for module in model.modules()):
            raise WrapError(
                f"{asked_by} names the class {asked.__module__}.{asked.__qualname__}, but {type(model).__name__} "
                f"has no module of it; {choices(asked.__name__, class_names(model))}"
            )


def class_names(model: nn.Module) -> list[str]:
    """Returns the names of the classes of a model's modules, those that hold others first."""
    modules = [module for module in model.modules() if module is not model]
    modules.sort(key=lambda module: not any(True for _ in module.children()))
    return list(dict.fromkeys(type(module).__name__ for module in modules))


def _import_class(path: str) -> type[nn.Module]:
    module_path, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module_path:
        raise WrapError(f"class path {path!r} is not a dotted one; write the module too, as torch.nn.Linear")
    module = _import_module(module_path, path)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    known = [n for n, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    what = "has no such class" if found is None else f"has {name} as a {type(found).__name__}, not a module class"
    raise WrapError(f"class path {path!r} does not import: {module_path} {what}; {choices(name, known)}")


def _import_module(module_path: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or module_path
        parent = missing.rpartition(".")[0]
        known: list[str] = []
        if parent and parent.startswith(module_path.split(".")[0]):
            known = _submodules(importlib.import_module(parent))
        hint = f"; {choices(missing.rpartition('.')[2], known)}" if known else "; is its package installed?"
        raise WrapError(f"class path {path!r} does not import: there is no module {missing}{hint}") from error


def _submodules(package: ModuleType) -> list[str]:
    found = pkgutil.iter_modules(getattr(package, "__path__", []))
    return [info.name for info in found if not info.name.startswith("_")]
