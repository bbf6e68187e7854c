"""Shards a model unit by unit, by torch's `fully_shard`, which only this file calls.

`FreedWeights` keeps weights that autograd has saved readable, after torch has freed their unit.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from ...base._torch_compat import NO_BACKWARD, current_backward, reduce_parameters_without_gradient
from ...base.errors import ShardstackError, warn_once
from ..groups import DataParallelGroups, kind_of
from ..model.forward_hooks import SavedWeights, in_use_message
from ..model.initial_values import parameter_attributes_kept
from ..plan import Plan, UnitPlan
from ..step_marks import replaced_parameters_marked
from . import torch_private
from .torch_private import as_fsdp, fsdp_modules, gathered_tensors_of, groups_of

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
        if plan.sums_gradients or plan.settings.reproducible_across_ranks:
            # A factor other than the number of ranks is PREMUL_SUM, which gloo refuses, unless a sum is forced.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu" and (plan.settings.forward_prefetch or plan.settings.backward_prefetch):
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
            if not plan.sums_gradients:
                member.set_all_reduce_hook(partial(Tensor.mul_, other=1.0 / groups.divisor))  # type: ignore[arg-type]


# ---- what of a freed unit stays readable


def reject_graph_of_gradients(reached: str) -> None:
    """Raises in a backward whose gradients keep a graph.

    Args:
        reached: what the backward has reached, for the message.

    Raises:
        ShardstackError: says what to use instead.
    """
    if torch.is_grad_enabled() and current_backward() != NO_BACKWARD:
        raise ShardstackError(
            f"a backward with create_graph=True reached {reached} under FSDP2, which frees parameters during "
            "backward, so that no second backward could go through it; use DistributedDataParallel for losses that "
            "contain gradients"
        )


class FreedWeights:
    """`SavedWeights` of one unit, whose gathered weights torch frees after each forward.

    A unit stays gathered after its forwards from the first one on that leaves a view of a weight in use.

    Args:
        unit: the unit, sharded.

    Raises:
        ShardstackError: in a backward whose gradients keep a graph (``create_graph=True``).
    """

    def __init__(self, unit: UnitPlan) -> None:
        self._unit, self._module, self._groups = unit, as_fsdp(unit.modules[0]), groups_of(unit.modules[0])
        # Hooks of autograd around each forward; they live as long as the module.
        self._saved = SavedWeights(partial(gathered_tensors_of, self._groups), self._gather)
        for module in unit.modules:
            module.register_forward_pre_hook(self._before)  # after torch has gathered
            module.register_forward_hook(self._after, prepend=True, always_call=True)  # before torch frees

    def end_all(self) -> None:
        """Ends forwards that were interrupted."""
        self._saved.end_all()

    def _before(self, module: nn.Module, args: Any) -> None:
        self._saved.begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.end()
        if current_backward() == NO_BACKWARD and output is not None and self._saved.are_in_use():
            warn_once(in_use_message(" + ".join(self._unit.names)))
            self._module.set_reshard_after_forward(False, recurse=False)

    def _gather(self) -> None:
        reject_graph_of_gradients(f"unit {' + '.join(self._unit.names)}")
        if not self._unit.is_needed_in_backward:
            self._module.set_unshard_in_backward(True)  # it is, in this model
        if not torch_private.are_gathered(self._groups):  # torch would ask each parameter first
            self._module.unshard()
