"""Keeps what a program does to parameters while they are gathered: freezes them, sets hooks, builds an optimizer.

Relies on torch keeping one tensor for the shard of a parameter (``sharded_param``, ``_sharded_param_data``) and one
for the gathered parameter (``_unsharded_param``), each with a version that counts writes but no gathers. If gathers
were counted, every forward would gather again. If torch replaced the tensor, a write would be missed. Relies also on
``_to_unsharded`` and ``_to_sharded`` of a group, which alone set them on modules, those of ``_module_info``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ....diagnostics.step_marks import mark_as_gathered
from ....errors import UnitError
from ....local_parts import local_part
from .states import fsdp_parameters, name_of_parameter, param_groups


def keep_changes_of_parameters(root: nn.Module) -> None:
    """Keeps what a program sets on a parameter while it is gathered, and raises where it has set another parameter.

    Torch would lose a change of ``requires_grad`` with the gathered parameter (pytorch/pytorch#105371), never call the
    hooks of a shard, which no backward reaches, and set its own parameter over one that was assigned.
    Our attribute of torch's object, ``requires_grad_when_gathered``, holds the value at which shard and gathered
    parameter last agreed. It is set when the unit is gathered, and when the shard has taken over a change. Shard and
    gathered parameter share one dict of hooks, set here and when the unit is gathered.
    """
    for group in param_groups(root):
        group._to_unsharded = partial(_to_unsharded, group, group._to_unsharded)
        group._to_sharded = partial(_to_sharded, group, group._to_sharded)
        for parameter in group.fsdp_params:
            if parameter.sharded_param._backward_hooks is None:
                parameter.sharded_param._backward_hooks = OrderedDict()


def _to_unsharded(group: Any, method: Callable[[], None]) -> None:
    if group.is_unsharded:
        return
    reject_assigned(group)
    method()
    for parameter in group.fsdp_params:
        gathered = parameter._unsharded_param
        parameter.requires_grad_when_gathered = gathered.requires_grad
        gathered._backward_hooks = parameter.sharded_param._backward_hooks


def _to_sharded(group: Any, method: Callable[[], None]) -> None:
    if group.is_sharded:
        return
    reject_assigned(group)
    for parameter in group.fsdp_params:
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad != parameter.requires_grad_when_gathered:
            parameter.sharded_param.requires_grad_(gathered.requires_grad)
            parameter.requires_grad_when_gathered = gathered.requires_grad
    method()


def reject_assigned(group: Any, *, takes_shards: bool = False) -> None:
    """Raises unless modules hold the parameters that FSDP2 has set on them.

    Args:
        group: torch's object for the parameters that are gathered together.
        takes_shards: permit other shards, which torch takes over before the first forward.

    Raises:
        UnitError: names the parameter.
    """
    for parameter in group.fsdp_params:
        info, forms = parameter._module_info, _forms(parameter)
        places = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        for held in (getattr(module, name, None) for module, name in places):
            if not (any(held is form for form in forms) or (takes_shards and isinstance(held, DTensor))):
                raise UnitError(
                    f"parameter {name_of_parameter(parameter)} was replaced after the model was wrapped (an "
                    "assignment, tied weights, a parametrization, torch.func.functional_call), and FSDP2 would "
                    "compute with the one from before; change the model before it is wrapped, or use "
                    "DistributedDataParallel"
                )


def _forms(parameter: Any) -> tuple[nn.Parameter | None, ...]:
    """Returns all that modules may hold of a parameter: its shard, gathered, or shared by a part of the ranks."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.sharded_param, gathered, getattr(parameter, "_sharded_post_forward_param", None)


def names_of_parameters(root: nn.Module) -> dict[Any, str]:
    """Returns the name of each sharded parameter, by all that modules may hold of it."""
    return {form: name_of_parameter(parameter) for parameter in fsdp_parameters(root) for form in _forms(parameter)}


def shard_versions(root: nn.Module) -> list[int]:
    """Returns for each parameter a number that grows when its shard is written, as a DTensor or its local tensor."""
    return [
        parameter.sharded_param._version + parameter._sharded_param_data._version
        for parameter in fsdp_parameters(root)
    ]


def gathered_versions(root: nn.Module) -> dict[Any, int]:
    """Returns by torch's object the count of writes to each gathered parameter that modules compute with.

    A gather does not count. It is -1 for a parameter whose ``data`` was replaced: gathers no longer reach it.
    """
    return {p: _writes(p) for p in fsdp_parameters(root) if hasattr(p, "_unsharded_param")}


def _writes(parameter: Any) -> int:
    with torch.no_grad():
        storage = local_part(parameter._unsharded_param).untyped_storage()._cdata
    gathered = (output.untyped_storage()._cdata for output in parameter.all_gather_outputs)
    return int(parameter._unsharded_param._version) if storage in gathered else -1


def mark_gathered_parameter(parameter: Any) -> None:
    """Marks a gathered parameter, given torch's object, so that the step of an optimizer built from it raises."""
    mark_as_gathered(parameter._unsharded_param, name_of_parameter(parameter))
