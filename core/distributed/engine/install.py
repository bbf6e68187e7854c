"""Builds the units of a model, and the hooks around calls of modules: they gather, cast, or wait for a gather."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_map

from ...base.host_memory import transient_memory
from ...comm.collectives import Allocate
from ..groups import neighbour_groups
from ..model.unit_transforms import find_forward_methods
from ..plan import Plan
from .buffer import ParamAndGradBuffer
from .gathering import ParameterGathering
from .unit import Slot, Unit


def build_units(
    plan: Plan, buffers: Sequence[ParamAndGradBuffer], allocate: Allocate = transient_memory
) -> list[Unit]:
    """Builds the units of a plan, in its order, and the slots that they share; every rank calls it.

    Args:
        buffers: one for each buffer of the plan, in the same order.
        allocate: allocates the memory of slots.
    """
    slots, units = dict[int | None, Slot](), list[Unit]()
    neighbours = neighbour_groups(plan.groups.shard, (unit.kept_among for unit in plan.units))
    for planned in plan.units:
        buckets = [buffers[p.bucket[0]].buckets[p.bucket[1]] for p in planned.pieces if p.bucket is not None]
        if planned.slot is not None and planned.slot not in slots:
            sizes = [(bucket.numel, bucket.buffer.plan.gathered_dtype, bucket.buffer.device) for bucket in buckets]
            slots[planned.slot] = Slot(sizes, allocate)
        slot, kept_among = slots.get(planned.slot), neighbours.get(planned.kept_among)
        units.append(Unit(planned, slot, buckets, kept_among))
    return units


def install_call_hooks(plan: Plan, units: Sequence[Unit], gathering: ParameterGathering) -> None:
    """Gathers parameters around every forward of the units' modules, and around the methods that the plan names.

    Also makes a state dict hold this rank's shards. Hooks and replaced methods are never removed.

    Args:
        units: in the plan's order, the root last.

    Raises:
        WrapError: the plan names a method that no unit has.
    """
    (root,) = plan.units[-1].modules
    members = [module for planned in plan.units[:-1] for module in planned.modules]
    methods = find_forward_methods(root, members, plan.forward_methods)
    shows_ranges = _CallHooks(units[-1], gathering).before_state_dict
    for module in root.modules():
        module.register_state_dict_pre_hook(shows_ranges)
    for unit in units:
        around = _CallHooks(unit, gathering)
        for module in unit.plan.modules:
            module.register_forward_pre_hook(around.before, prepend=True, with_kwargs=True)
            module.register_forward_hook(around.after, always_call=True)
            for name in methods.get(module, ()):
                setattr(module, name, around.enclose(getattr(module, name)))


class _CallHooks:
    """Hooks of one unit's modules; they do nothing in a pickled or copied module, where `_gathering` is None."""

    def __init__(self, unit: Unit, gathering: ParameterGathering | None) -> None:
        precision = unit.plan.precision
        self._inputs = precision.param_dtype if precision.cast_forward_inputs else None
        self._outputs = precision.output_dtype
        # None in a pickled or copied module (`_do_nothing`): hooks then do nothing. Otherwise fixed.
        self._unit, self._gathering = unit, gathering

    def before(self, module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._gathering is None:
            return None
        self._gathering.before_call(self._unit)
        return None if self._inputs is None else (_cast(args, self._inputs), _cast(kwargs, self._inputs))

    def after(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        if self._gathering is None:
            return None
        self._gathering.after_call(self._unit, output)
        return None if self._outputs is None else _cast(output, self._outputs)

    def before_state_dict(self, *unused: Any) -> None:
        """Hides gathered parameters, so that a state dict has this rank's shards."""
        if self._gathering is not None and not self._unit.running:
            self._gathering.settle()

    def enclose(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method with the work of the forward hooks around it."""

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.before(None, args, kwargs) or (args, kwargs)
            output = None
            try:
                output = method(*args, **kwargs)
            finally:
                changed = self.after(None, args, output)
            return output if changed is None else changed

        return called

    def __reduce__(self) -> tuple[Any, ...]:
        return _do_nothing, ()


def _do_nothing() -> Any:
    """Returns an `_CallHooks` without a unit, for a copied module."""
    made = object.__new__(_CallHooks)
    made._gathering = None
    return made


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a tree to `dtype`; returns the same tree if all of them have it."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not tree_any(is_other, tree):
        return tree
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, tree)


def wait_before_forwards(module: nn.Module, units: Sequence[Unit]) -> Iterator[Any]:
    """Makes each module below `module` wait for its parameters before its forward; yields the hooks' handles.

    All other code that reads a parameter waits too (`pending_parameters`). A module of torch with children waits for
    all parameters below it, because it may read its children's weights itself, and choose a kernel by them.
    """
    unit_of = {param: unit for unit in units for param in unit.name_of}
    for submodule in module.modules():
        params = submodule.parameters(recurse=_reads_weights_of_children(submodule))
        awaited = {unit_of[param]: None for param in params if param in unit_of}
        if awaited:  # before all other hooks, which may read parameters
            yield submodule.register_forward_pre_hook(_Waiter(list(awaited)), prepend=True)


class _Waiter:
    """Waits for the parameters of some units; in a pickled module it does nothing."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def __call__(self, *unused: Any) -> None:
        for unit in self._units:
            unit.wait_until_readable()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiter, ([],)


def _reads_weights_of_children(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, containers)
