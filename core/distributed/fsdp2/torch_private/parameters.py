"""Keeps what a program does to parameters while they are gathered: freezes them, or builds an optimizer of them.

Relies on torch keeping one tensor for the shard of a parameter (``sharded_param``, ``_sharded_param_data``) and one
for the gathered parameter (``_unsharded_param``), each with a version that counts writes but no gathers. If gathers
were counted, every forward would gather again. If torch replaced the tensor, a write would be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ....diagnostics.stale_optimizers import mark_as_gathered
from ....dtensors import local_part
from .states import fsdp_parameters, name_of_parameter


def keep_changes_of_requires_grad(root: nn.Module) -> None:
    """Keeps a change of ``requires_grad`` that a program makes while a parameter is gathered.

    Torch would lose it with the gathered parameter (pytorch/pytorch#105371). Our attribute of torch's object,
    ``requires_grad_when_gathered``, holds the value at which shard and gathered parameter last agreed. It is set when
    the unit is gathered, and when the shard has taken over a change.
    """
    for parameter in fsdp_parameters(root):
        parameter.to_unsharded = partial(_to_unsharded, parameter, parameter.to_unsharded)
        parameter.to_sharded = partial(_to_sharded, parameter, parameter.to_sharded)


def _to_unsharded(parameter: Any, method: Callable[[], None]) -> None:
    method()
    parameter.requires_grad_when_gathered = parameter._unsharded_param.requires_grad


def _to_sharded(parameter: Any, method: Callable[[], None]) -> None:
    gathered = getattr(parameter, "_unsharded_param", None)
    if gathered is not None and gathered.requires_grad != parameter.requires_grad_when_gathered:
        parameter.sharded_param.requires_grad_(gathered.requires_grad)
        parameter.requires_grad_when_gathered = gathered.requires_grad
    method()


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
