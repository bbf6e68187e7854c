"""Finds the modules that become units, whose parameters are gathered and reduced together, and their transforms.

`default_units` chooses the units of a model whose user names none, and `warn_of_large_root` tells when too much of a
model is in none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.errors import ParallelConfigError, WrapError, warn_once
from ...base.module_protocol import is_one_layer, unit_classes
from ...base.text import choices, readable_bytes
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..groups import ParameterKind, kind_of
from .parts import UnitPlan, UnitTransform

UnitChoice = type[nn.Module] | nn.Module | str
"""A class or its name, whose outermost instances become units, or one module, which becomes one."""

CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)
"""As classes of units they make every item of such a container a unit. `find_units` looks into nested ones."""

_SMALL_BYTES = 2**20
"""Of a model that may be gathered whole without a warning."""

_Owners = dict[nn.Parameter, set["nn.Module | None"]]


def find_units(
    root: nn.Module, classes: Iterable[UnitChoice], *, splits_dtypes: bool = True, kinds: Container[ParameterKind] = ()
) -> list[UnitPlan]:
    """Returns the units of a model, children before parents. A parameter is in one unit, or left to the root.

    - The outermost modules that are instances of one of ``classes`` are units.
    - Instances of a class in the attribute ``_fsdp_modules`` of any module are units, nested ones too. With it a model
      of Megatron-LM names its own units.
    - A module that is itself in ``classes`` is a unit, nested or not.
    - A module without parameters is no unit.
    - A container without a forward (`nn.ModuleList`, `nn.ModuleDict`) that would be a unit is replaced by its items,
      recursively. An `nn.Sequential` is a unit.
    - A module is left to the root, which is gathered for the whole forward, if code outside it reads one of its
      weights: one marked ``shared_embedding`` (Megatron's mark), or registered outside the units too.
    - Units that tie a weight only among themselves become one unit.
    - FSDP2 takes one dtype of trainable parameters in a unit. In a unit, or the root, with several, the modules with
      those of a rarer dtype (fp32 norms in a bf16 layer) become a separate unit before it, unless `splits_dtypes` is
      False. So do those with parameters of one of `kinds`, which other ranks share.

    Raises:
        WrapError: an entry of ``classes`` or ``_fsdp_modules`` that is not a module class, or a module that itself
            holds trainable parameters of two dtypes.
    """
    given = list(classes)
    singled_out = {choice for choice in given if isinstance(choice, nn.Module)}.intersection(root.modules())
    others = (choice for choice in given if not isinstance(choice, nn.Module) or choice not in singled_out)
    outermost = _as_classes(others, "sub_modules_to_wrap")
    declared = (entry for module in root.modules() for entry in getattr(module, "_fsdp_modules", ()))
    always = tuple(dict.fromkeys(_as_classes(declared, "_fsdp_modules")))
    chosen = list(_match_modules(root, outermost, always, singled_out))
    owners = _owners_of_parameters(root, chosen)
    while any(_is_read_outside(module, owners) for module in chosen):  # a parent may inherit the weight: look again
        chosen = [module for module in chosen if not _is_read_outside(module, owners)]
        owners = _owners_of_parameters(root, chosen)
    names = {module: name for name, module in root.named_modules()}
    units = [unit_of(modules, names) for modules in _unite_sharers(chosen, owners)]
    return [
        part
        for unit in (*units, unit_of((root,), names))
        for part in (*(_minority_units(unit, owners, names, kinds) if splits_dtypes else ()), unit)
        if part.modules != (root,)
    ]


def resolve_names(
    model: nn.Module, given: Iterable[UnitChoice], asked_by: str = "sub_modules_to_wrap"
) -> tuple[type[nn.Module] | nn.Module, ...]:
    """Returns the choices, with each name replaced by the classes of that name that modules of the model have.

    Raises:
        WrapError: no module has a class of that name; lists the classes of the model.
    """
    classes = {type(module): None for module in model.modules()}
    resolved = list[type[nn.Module] | nn.Module]()
    for choice in [given] if isinstance(given, str) else given:
        found = [kind for kind in classes if kind.__name__ == choice] if isinstance(choice, str) else [choice]
        if not found:
            raise WrapError(
                f"{asked_by} names the class {choice!r}, and {type(model).__name__} has no module of it; "
                f"{choices(str(choice), class_names(model))}"
            )
        resolved += found
    return tuple(resolved)


def class_names(model: nn.Module) -> list[str]:
    """Returns the names of the classes of a model's modules, those that hold others first."""
    modules = [module for module in model.modules() if module is not model]
    modules.sort(key=lambda module: not any(True for _ in module.children()))
    return list(dict.fromkeys(type(module).__name__ for module in modules))


def params_of_units(units: Iterable[UnitPlan]) -> Iterator[list[nn.Parameter]]:
    """Yields for each unit the parameters that no unit before it has."""
    earlier: set[nn.Parameter] = set()
    for unit in units:
        params = (p for member in unit.modules for p in member.parameters() if kind_of(p) != "ignored")
        own = list(dict.fromkeys(p for p in params if p not in earlier))
        earlier.update(own)
        yield own


def unit_of(modules: tuple[nn.Module, ...], names: Mapping[nn.Module, str], *, is_minority: bool = False) -> UnitPlan:
    """Returns the unit of these modules, without what is decided later about it."""
    return UnitPlan(
        modules=modules,
        names=tuple(names[module] for module in modules),
        is_minority=is_minority,
        is_needed_in_backward=any(getattr(module, "weights_used_in_backward", True) for module in modules),
    )


_Kind = tuple[torch.dtype, ParameterKind]
"""Dtype of parameters, and a kind with ranks of its own, or else ``dense``."""


def _minority_units(
    unit: UnitPlan, owners: _Owners, names: dict[nn.Module, str], apart: Container[ParameterKind]
) -> Iterator[UnitPlan]:
    """Returns the modules that hold the unit's own trainable parameters of each kind but the commonest dense one."""
    holders: dict[_Kind, list[nn.Module]] = defaultdict(list)
    elements: Counter[_Kind] = Counter()
    has_dense = False
    is_root = not unit.names[0]
    for module in (submodule for member in unit.modules for submodule in member.modules()):
        own = [
            (parameter, of if (of := kind_of(parameter)) in apart else "dense")
            for parameter in module.parameters(recurse=False)
            if kind_of(parameter) != "ignored" and owners[parameter] & {None if is_root else m for m in unit.modules}
        ]
        # Frozen dense parameters are of no kind, and stay: others next to them must not stay with them.
        has_dense = has_dense or any(of == "dense" for _, of in own)
        kinds = {(p.dtype, of) for p, of in own if of != "dense" or p.requires_grad}
        if len(kinds) > 1:
            raise WrapError(
                f"module {names[module] or 'root'!r} holds trainable parameters of {len(kinds)} dtypes, "
                f"{_list_kinds(kinds)}, and FSDP2 reduces one dtype at a time, over one set of ranks; give them one "
                "dtype, or put them into modules of their own"
            )
        for kind in kinds:
            if module not in holders[kind]:
                holders[kind].append(module)
                elements[kind] += sum(parameter.numel() for parameter, _ in own if parameter.requires_grad)
    # FSDP2 shards a module with all modules below it, so the kind whose modules contain others stays.
    outer = [kind for kind in holders if _has_others_inside(kind, holders)]
    if len(outer) > 1:
        raise WrapError(
            f"trainable parameters of {_list_kinds(outer)} are inside modules of each other in "
            f"{unit.names[0] or 'the root'!r}, and FSDP2 reduces one dtype at a time, over one set of ranks; give "
            "them one dtype, or name the inner modules in sub_modules_to_wrap"
        )
    dense = Counter({kind: count for kind, count in elements.items() if kind[1] == "dense" or not has_dense})
    stays = outer or [kind for kind, _ in dense.most_common(1)]
    for kind, modules in holders.items():
        if kind not in stays:
            inside = {below for module in modules for below in module.modules() if below is not module}
            yield unit_of(tuple(m for m in modules if m not in inside), names, is_minority=True)


def _list_kinds(kinds: Iterable[_Kind]) -> str:
    return ", ".join(sorted(str(dtype) if kind == "dense" else f"{dtype} ({kind})" for dtype, kind in kinds))


def _has_others_inside(kind: _Kind, holders: dict[_Kind, list[nn.Module]]) -> bool:
    others = {module for other, modules in holders.items() if other != kind for module in modules}
    return any(below in others for holder in holders[kind] for below in holder.modules() if below is not holder)


def _as_classes(classes: Iterable[Any], origin: str) -> tuple[type[nn.Module], ...]:
    module_classes = tuple(classes)
    for entry in module_classes:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise WrapError(f"{origin} holds {entry!r}, which is not a module class; give classes such as nn.Linear")
    return module_classes


def _match_modules(
    root: nn.Module,
    outermost: tuple[type[nn.Module], ...],
    always: tuple[type[nn.Module], ...],
    singled_out: set[nn.Module],
) -> Iterator[nn.Module]:
    """Yields modules below the root that match, children before parents, each once. Items replace a container."""
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, is_inside_match: bool, stands_for_items: bool) -> Iterator[nn.Module]:
        for child in module.children():
            if child in visited:
                continue
            visited.add(child)
            matches = isinstance(child, always) or (not is_inside_match and isinstance(child, outermost))
            matches = matches or stands_for_items or child in singled_out
            has_forward = type(child).forward is not nn.Module.forward or "forward" in vars(child)
            is_container = (isinstance(child, CONTAINERS) or stands_for_items) and not has_forward
            yield from visit(child, is_inside_match or (matches and not is_container), matches and is_container)
            if matches and not is_container and any(kind_of(p) != "ignored" for p in child.parameters()):
                yield child

    yield from visit(root, False, False)


def _owners_of_parameters(root: nn.Module, chosen: list[nn.Module]) -> _Owners:
    """Returns for each parameter the chosen modules that hold it most closely. None is the root."""
    owners: _Owners = defaultdict(set)
    chosen_set = set(chosen)

    def visit(module: nn.Module, owner: nn.Module | None) -> None:
        owner = module if module in chosen_set else owner
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(owner)
        for child in module.children():
            visit(child, owner)

    visit(root, None)
    return owners


def _is_read_outside(module: nn.Module, owners: _Owners) -> bool:
    return any(
        getattr(parameter, "shared_embedding", False) or None in owners[parameter]
        for parameter in module.parameters()
        if module in owners[parameter]
    )


def _unite_sharers(modules: list[nn.Module], owners: _Owners) -> Iterator[tuple[nn.Module, ...]]:
    """Groups modules that share a parameter. A group takes the place of its last member, after all its children."""
    group_of = {module: {module} for module in modules}
    for holders in owners.values():
        sharers = [module for module in modules if module in holders]
        united = set().union(*(group_of[module] for module in sharers)) if len(sharers) > 1 else set()
        for module in united:
            group_of[module] = united
    for index, module in enumerate(modules):
        group = group_of[module]
        if group.isdisjoint(modules[index + 1 :]):
            yield tuple(member for member in modules if member in group)


def plan_transforms(units: Sequence[UnitPlan], ddp_config: DistributedDataParallelConfig) -> tuple[UnitTransform, ...]:
    """Chooses the units whose activations are computed again in backward, and those that are compiled.

    Skips single-layer units (an embedding, a projection), where recomputing saves nothing, units whose backward reads
    no weight, and units nested in other units, which are transformed with them.

    Raises:
        ParallelConfigError: a model that recomputes by itself as well (``recompute_granularity``); or no unit that it
            could be done to.
    """
    recomputes = ddp_config.activation_checkpointing != "none"
    if not ddp_config.transforms_units:
        return ()
    inside = {below for unit in units for module in unit.modules for below in module.modules() if below is not module}
    layers = [
        unit
        for unit in units
        if unit.is_needed_in_backward
        and not inside.issuperset(unit.modules)
        and not all(map(is_one_layer, unit.modules))
    ]
    if not layers:
        raise ParallelConfigError(
            f"activation_checkpointing is {ddp_config.activation_checkpointing!r}, compile_units "
            f"{ddp_config.compile_units} and offload_activations {ddp_config.offload_activations}, but no unit has "
            "more than one layer of weights; name the classes of the model's blocks in sub_modules_to_wrap"
        )
    if recomputes:
        _reject_own_recomputation(layers, ddp_config.activation_checkpointing)
    return tuple(
        UnitTransform(
            modules=unit.modules,
            recomputes=ddp_config.activation_checkpointing,
            is_compiled=bool(ddp_config.compile_units),
            # Backward begins with the last layer: its activations would be back at once.
            offloads=ddp_config.offload_activations and unit is not layers[-1],
        )
        for unit in layers
    )


def _reject_own_recomputation(units: Iterable[UnitPlan], activation_checkpointing: str) -> None:
    for submodule in (below for unit in units for module in unit.modules for below in module.modules()):
        granularity = getattr(getattr(submodule, "config", None), "recompute_granularity", None)
        if granularity is not None:
            raise ParallelConfigError(
                f"activation_checkpointing is {activation_checkpointing!r} in the wrapper's settings and "
                f"recompute_granularity is {granularity!r} in the model's config: both would compute the same "
                "activations again; drop one of the two"
            )


# ---- where the user names no units


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
    if in_all < _SMALL_BYTES or 2 * in_root <= in_all or 2 * sizes.total() <= in_root:
        return
    kinds = dict.fromkeys(c if isinstance(c, type) else type(c) for c in classes)
    used = [kind for kind in kinds if kind in CONTAINERS or any(isinstance(m, kind) for m in members)]
    names = [
        kind.__name__ for kind in (*(used if members else ()), *(kind for kind, size in sizes.most_common() if size))
    ]
    warn_once(
        f"{readable_bytes(in_root)} of {readable_bytes(in_all)} of {type(units[-1].modules[0]).__name__} are in no "
        "unit, and stay gathered on every rank for the whole step; name the classes of its layers, as by "
        f"sub_modules_to_wrap={[*dict.fromkeys(names)]}. No number changes"
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
