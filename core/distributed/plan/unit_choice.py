"""Chooses the units of a model whose user names none, and tells when too much of a model is in none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ...base.errors import warn_once
from ...base.module_protocol import unit_classes
from ...base.text import readable_bytes
from .parts import UnitPlan

UnitChoice = type[nn.Module] | nn.Module
"""A class, whose outermost instances become units, or one module, which becomes one."""

CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)
"""As classes of units they make every item of such a container a unit. `find_units` looks into nested ones."""


def default_units(root: nn.Module) -> tuple[UnitChoice, ...]:
    """Returns the units of a model whose user names none.

    They are the classes that say so by ``is_unit``, or what the model has in ``_fsdp_modules``, else its outermost
    lists of repeated layers, whose items become units.
    """
    classes = unit_classes(root)
    if classes or any(hasattr(module, "_fsdp_modules") for module in root.modules()):
        return classes
    return tuple(_lists_of_layers(root))


def _lists_of_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost lists and dicts in which a class repeats, and lists of one layer."""
    for child in module.children():
        kinds = Counter(type(item) for item in child.children())
        repeats = max(kinds.values(), default=0) > 1 or (isinstance(child, nn.ModuleList) and len(child) == 1)
        if isinstance(child, CONTAINERS) and repeats:
            yield child
        else:
            yield from _lists_of_layers(child)


def warn_of_large_root(
    units: Sequence[UnitPlan], params: Sequence[Sequence[nn.Parameter]], classes: Iterable[UnitChoice]
) -> None:
    """Warns if most bytes of a model are in the root, which stays gathered for the whole step, and could be in units.

    Args:
        units: the root is the last.
        params: what each of them gathers.
        classes: those that the units were chosen by.
    """
    members = [module for unit in units[:-1] for module in unit.modules]
    in_root, in_all = _bytes_of(params[-1]), sum(map(_bytes_of, params))
    sizes: Counter[type[nn.Module]] = Counter()
    for layer in _layers_outside(units[-1].modules[0], set(members)):
        if set(params[-1]).issuperset(layer.parameters()):
            sizes[type(layer)] += _bytes_of(layer.parameters())
    if 2 * in_root <= in_all or 2 * sizes.total() <= in_root:
        return
    kinds = dict.fromkeys(c if isinstance(c, type) else type(c) for c in classes)
    used = [kind for kind in kinds if kind in CONTAINERS or any(isinstance(m, kind) for m in members)]
    names = [kind.__name__ for kind in (*(used if members else ()), *(kind for kind, _ in sizes.most_common()))]
    warn_once(
        f"{readable_bytes(in_root)} of {readable_bytes(in_all)} of {type(units[-1].modules[0]).__name__} are in no "
        "unit, and stay gathered on every rank for the whole step; name the classes of its layers, as by "
        f"sub_modules_to_wrap=[{', '.join(dict.fromkeys(names))}]. No number changes"
    )


def _bytes_of(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def _layers_outside(module: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the outermost modules next to units that have a sibling of their class, or no children."""
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        is_layer = kinds[type(child)] > 1 or not any(True for _ in child.children())
        if is_layer and not isinstance(child, CONTAINERS) and units.isdisjoint(child.modules()):
            yield child
        elif child not in units:
            yield from _layers_outside(child, units)
