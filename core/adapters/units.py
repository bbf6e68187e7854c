"""Chooses units as the wrap policies of torch's first FSDP do: by parameter count, or by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ..errors import WrapError
from ..text import choices
from .nemo import import_classes_from_paths
from .nemo.class_paths import check_classes_are_in, class_names

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
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
    """Adds the units in a module, which may be one itself, to `chosen`; returns the number of their parameters."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if total < least or isinstance(module, _KEPT_WHOLE):
        return 0
    inside = sum(_choose(child, least, chosen) for child in module.children())
    if total - inside < least or isinstance(module, _CONTAINERS):
        return inside
    chosen.append(module)
    return total


def units_by_class(model: nn.Module, names: str | None, asked_by: str) -> list[type[nn.Module]]:
    """Returns the classes that `names` lists, separated by commas; by default those of the layers that the model
    repeats.

    A dotted name is imported; a plain one is looked for among the model's modules.

    Raises:
        WrapError: no module has a named class; lists the classes of the model.
    """
    if names is None:
        return _guessed(model, asked_by)
    found = [_class_of(model, name.strip(), asked_by) for name in names.split(",") if name.strip()]
    check_classes_are_in(model, found, asked_by)
    return found


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
    """Returns the classes that the model declares whole, as Hugging Face's do; else the largest class in its lists."""
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = {type(module) for module in model.modules() if type(module).__name__ in declared}
    if not found:
        weights: Counter[type[nn.Module]] = Counter()
        for item in _items(model):
            weights[type(item)] += sum(parameter.numel() for parameter in item.parameters())
        found = {kind for kind, _ in weights.most_common(1)}
    if not found:
        raise WrapError(
            f"{asked_by} is not given, and {type(model).__name__} has no list of layers to guess it from; name the "
            f"class of its layers: {choices('', class_names(model))}"
        )
    return sorted(found, key=lambda kind: kind.__name__)


def _items(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            yield from (item for item in module.children() if not isinstance(item, _CONTAINERS))
