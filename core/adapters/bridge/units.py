"""Chooses units by parameter count, by class or by the dotted path of a class, and checks that a model has them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ...base.errors import WrapError
from ...base.text import choices

CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)
"""As classes of units they make every item of such a container a unit. `find_units` looks into nested ones."""
_KEPT_WHOLE = (nn.MultiheadAttention,)


def units_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Returns the modules that hold that many parameters at least, those of units inside them not counted.

    As torch's `size_based_auto_wrap_policy`: looked for from the inside out; `nn.ModuleList` and `nn.ModuleDict` are
    none, and an `nn.MultiheadAttention` is not cut.
    """
    chosen: list[nn.Module] = []
    _choose(model, min_num_params, chosen)
    return [module for module in chosen if module is not model]


def _choose(module: nn.Module, least: int, chosen: list[nn.Module]) -> int:
    """Adds the units in a module, which may be one itself, to `chosen`. Returns the number of their parameters."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if total < least or isinstance(module, _KEPT_WHOLE):
        return 0
    inside = sum(_choose(child, least, chosen) for child in module.children())
    if total - inside < least or isinstance(module, CONTAINERS):
        return inside
    chosen.append(module)
    return total


def units_by_class(model: nn.Module, names: str | None, asked_by: str) -> list[type[nn.Module]]:
    """Returns the classes that `names` lists, separated by commas. None: those of the layers that the model repeats.

    A dotted name is imported; a plain one is looked for among the model's modules.

    Raises:
        WrapError: no module has a named class; lists the classes of the model.
    """
    if names is None:
        return _guessed(model, asked_by)
    classes = [_class_of(model, name.strip(), asked_by) for name in names.split(",") if name.strip()]
    check_classes_are_in(model, classes, asked_by)
    return classes


def _class_of(model: nn.Module, name: str, asked_by: str) -> type[nn.Module]:
    if "." in name:
        return import_classes_from_paths([name])[0]
    for module in model.modules():
        if type(module).__name__ == name:
            return type(module)
    raise WrapError(
        f"{asked_by} names the class {name!r}, and {type(model).__name__} has no module of it; "
        f"{choices(name, class_names(model))}"
    )


def _guessed(model: nn.Module, asked_by: str) -> list[type[nn.Module]]:
    """Returns the classes that the model declares whole, as Hugging Face's do, or the largest class in its lists."""
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    classes = {type(module) for module in model.modules() if type(module).__name__ in declared}
    if not classes:
        weights: Counter[type[nn.Module]] = Counter()
        for item in _items(model):
            weights[type(item)] += sum(parameter.numel() for parameter in item.parameters())
        classes = {kind for kind, _ in weights.most_common(1)}
    if not classes:
        raise WrapError(
            f"{asked_by} is not given, and {type(model).__name__} has no list of layers to guess it from; name the "
            f"class of its layers: {choices('', class_names(model))}"
        )
    return sorted(classes, key=lambda kind: kind.__name__)


def _items(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, CONTAINERS):
            yield from (item for item in module.children() if not isinstance(item, CONTAINERS))


def import_classes_from_paths(class_paths: Iterable[str | type[nn.Module]]) -> list[type[nn.Module]]:
    """Returns the module classes of these dotted paths, as ``"torch.nn.Linear"``. A class is taken as it is.

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
    for unit_class in classes:
        if not any(isinstance(module, unit_class) for module in model.modules()):
            raise WrapError(
                f"{asked_by} names the class {unit_class.__module__}.{unit_class.__qualname__}, but "
                f"{type(model).__name__} has no module of it; {choices(unit_class.__name__, class_names(model))}"
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
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise WrapError(
            f"class path {path!r} does not import: there is no module {error.name}; correct its name, or install its "
            "package"
        ) from error
    value = getattr(module, name, None)
    if isinstance(value, type) and issubclass(value, nn.Module):
        return value
    known = [n for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    what = "has no such class" if value is None else f"has {name} as a {type(value).__name__}, not a module class"
    raise WrapError(f"class path {path!r} does not import: {module_path} {what}; {choices(name, known)}")
