"""Shards a model unit by unit, by torch's `fully_shard`, which only this file calls."""

from __future__ import annotations

import weakref
from functools import partial

from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from ...base._torch_compat import reduce_parameters_without_gradient
from ..groups import DataParallelGroups, kind_of
from ..model.initial_values import parameter_attributes_kept
from ..plan import GradientReduction, Plan
from ..step_marks import replaced_parameters_marked
from . import torch_private
from .torch_private import as_fsdp

SHARDED_HERE: weakref.WeakSet[fsdp.FSDPModule] = weakref.WeakSet()
"""Modules that this library sharded, and not a call of torch's `fully_shard`. `shard_model` adds them."""


def shard_model(plan: Plan) -> None:
    """Shards a model in place, unit by unit and then the root.

    Parameters become DTensors, cut on dim 0 over the mesh's last axis and replicated over its first where it has two,
    with the custom attributes that they had. Units of experts are on the mesh of these, and replicated ones on that of
    this rank alone: torch sends nothing of them. ``reproducible_across_ranks`` leaves out the first axis. A parameter
    that no backward reached has a zero gradient, as under replication. Parameters on the meta device stay there,
    sharded; others have to be equal on all ranks already (`InitialValues`).
    """
    module, mesh = plan.root.modules[0], plan.groups.mesh
    if (
        plan.settings.reproducible_across_ranks and plan.groups.replicate is not None
    ):  # `GradientSums` adds up replicas, in order
        mesh = DeviceMesh.from_group(plan.groups.shard, mesh.device_type, mesh_dim_names=("dp_cp",))
    meshes = {"dense": mesh}
    if plan.groups.experts is not None:
        meshes["expert"] = plan.groups.experts.mesh
    if plan.groups.replicated is not None:
        alone = plan.groups.replicated.shard
        meshes["replicated"] = DeviceMesh.from_group(alone, mesh.device_type, mesh_dim_names=("dp_cp",))
    ignored = {parameter for parameter in module.parameters() if kind_of(parameter) == "ignored"}
    offload_policy = (
        fsdp.CPUOffloadPolicy(pin_memory=plan.settings.pins_memory)
        if plan.settings.cpu_offload
        else fsdp.OffloadPolicy()
    )
    with parameter_attributes_kept(module), replaced_parameters_marked(module):
        for unit in plan.units:
            fsdp.fully_shard(
                unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
                mesh=meshes.get(unit.kind, mesh),
                reshard_after_forward=unit.is_freed,
                mp_policy=unit.precision,
                offload_policy=offload_policy,
                ignored_params=ignored or None,
            )
    SHARDED_HERE.update(fsdp_modules(module))
    for unit in plan.units[:-1]:
        if not unit.is_needed_in_backward:
            for member in unit.modules:
                as_fsdp(member).set_unshard_in_backward(False)
    for submodule in fsdp_modules(module):  # a setting of FSDP2 acts on one module
        reduce_parameters_without_gradient(submodule)
        if plan.reduction is GradientReduction.SUM or plan.settings.reproducible_across_ranks:
            # A factor other than the number of ranks is PREMUL_SUM, which gloo refuses, unless a sum is forced.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu" and plan.gathers_ahead:
            torch_private.gather_asynchronously(submodule)
    if plan.groups.experts is not None:
        _divide_gradients_of_experts(plan, plan.groups.experts)


def _divide_gradients_of_experts(plan: Plan, groups: DataParallelGroups) -> None:
    """Makes the mean of an expert's gradients one over all replicas of dense parameters.

    Torch would divide by the ranks of the unit's own mesh. A factor it would apply twice where the unit has one rank
    (torch 2.13). It is given 1, and the hook that it calls with reduced gradients divides.
    """
    for unit in plan.units:
        if unit.kind == "expert":
            member = as_fsdp(unit.modules[0])
            member.set_gradient_divide_factor(1.0)
            member.set_force_sum_reduction_for_comms(True)
            if plan.reduction is GradientReduction.MEAN:
                member.set_all_reduce_hook(partial(Tensor.mul_, other=1.0 / groups.divisor))  # type: ignore[arg-type]


def fsdp_modules(module: nn.Module) -> list[fsdp.FSDPModule]:
    """Returns every module that torch's `fully_shard` has been applied to, the root first."""
    return [submodule for submodule in module.modules() if isinstance(submodule, fsdp.FSDPModule)]
