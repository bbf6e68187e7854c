"""Shards a model unit by unit, by torch's `fully_shard`, which only this file calls, and gathers units ahead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from ...base._torch_compat import NO_BACKWARD, current_backward, reduce_parameters_without_gradient
from ...base.errors import ShardstackError, warn_once
from ...diagnostics.step_marks import replaced_parameters_marked
from ..engine.gathered_units import UnitOrder
from ..groups import DataParallelGroups, kind_of
from ..model.forward_hooks import SavedWeights, in_use_message, watch_outputs
from ..model.initial_values import parameter_attributes_kept
from ..model.unfit_models import note_sharded
from ..plan import GradientReduction, Plan, UnitPlan
from . import torch_private
from .torch_private import as_fsdp


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
        fsdp.CPUOffloadPolicy(pin_memory=plan.settings.pin_memory)
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
    note_sharded(fsdp_modules(module))
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


# ---- gathered ahead of their use, and readable by backward after they are freed


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
        self._unit, self._module = unit, as_fsdp(unit.modules[0])
        # Hooks of autograd around each forward; they live as long as the module.
        self._saved = SavedWeights(self._memory, self._gather)
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

    def _memory(self) -> Sequence[torch.Tensor]:
        return torch_private.gathered_tensors_of(self._module)

    def _gather(self) -> None:
        reject_graph_of_gradients(f"unit {' + '.join(self._unit.names)}")
        if not self._unit.is_needed_in_backward:
            self._module.set_unshard_in_backward(True)  # it is, in this model
        self._module.unshard()


def prefetch_units(plan: Plan) -> UnitOrder[nn.Module]:
    """Puts hooks on the units of a sharded model, before FSDP2's own, which read what is set here.

    Methods that the plan names gather their module and are followed as `forward` is.

    Returns:
        the order of units, each known by its first module. The hooks keep it up to date.

    Raises:
        WrapError: the plan names a method that no unit has.
    """
    units = {unit.modules[0]: unit for unit in plan.units[:-1]}
    model = plan.root.modules[0]
    # Units whose inputs needed no gradient when they last ran: torch reduces them when the backward ends. `enter`
    # keeps it up to date. Of units that have not run yet the first one counts, of which ranks may differ.
    first: set[nn.Module] = {*[*units][:1]}
    # Units that a backward has passed by since the last forward began. `pass_by` adds, `begin` clears.
    passed: set[nn.Module] = set()

    def pass_by(module: nn.Module, begins: bool) -> None:
        if begins:
            # Where others have run the unit, the one after it has an input with a gradient, and is reduced before.
            for before in units:
                if before in first and before not in passed:
                    torch_private.end_backward(as_fsdp(before))
            passed.add(module)
            torch_private.begin_backward(as_fsdp(module))
        elif module not in first:
            torch_private.end_backward(as_fsdp(module))

    order = UnitOrder(plan, units, pass_by)

    def begin(*unused: Any) -> None:
        if current_backward() == NO_BACKWARD:
            passed.clear()
            _set_forward(model, order.begin())

    def end(*unused: Any) -> None:
        if current_backward() == NO_BACKWARD:
            gather_skipped()
            order.leave_model()
            _set_backward(model, order.before())

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_backward() == NO_BACKWARD:
            gather_skipped(module)
            if torch.is_grad_enabled():
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                (first.discard if any(leaf.requires_grad for leaf in inputs) else first.add)(module)
        begin_forward(module)

    def begin_forward(module: nn.Module) -> None:
        _set_forward(module, order.enter(module))
        if current_backward() == NO_BACKWARD:
            _set_backward(module, order.before(module))

    def gather_skipped(module: nn.Module | None = None) -> None:
        for skipped in order.skipped_before(module):
            begin_forward(skipped)
            torch_private.gather_for_forward(as_fsdp(skipped))
            order.leave_skipped(skipped)

    # The backward at whose end `end_units` is called. `reach_backward` sets it.
    ends_in = NO_BACKWARD

    def end_units() -> None:
        # Torch would reduce the root before a first unit. Ranks that took another one for the first do not.
        for module in reversed(units):
            torch_private.end_backward(as_fsdp(module))

    def reach_backward(module: nn.Module, gradient: Any) -> None:
        nonlocal ends_in
        order.reach(module)
        if plan.settings.gather_skipped_units and ends_in != current_backward():
            ends_in = current_backward()
            torch.autograd.Variable._execution_engine.queue_callback(end_units)

    def reach(module: nn.Module, args: Any, output: Any) -> None:
        if module in units:
            order.leave(module, output, module.parameters())
        if current_backward() == NO_BACKWARD:
            watch_outputs(output, partial(reach_backward, module))

    def follow(module: nn.Module, name: str) -> None:
        method = getattr(module, name)

        @functools.wraps(method)
        def reaching(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            reach(module, args, output)
            return output

        setattr(module, name, reaching)
        fsdp.register_fsdp_forward_method(module, name)
        gathering = getattr(module, name)

        @functools.wraps(method)
        def followed(*args: Any, **kwargs: Any) -> Any:
            if module is model:
                begin()
            elif module in units:
                enter(module, args, kwargs)
            try:
                output = gathering(*args, **kwargs)
                if module is model:
                    end()
            finally:
                if module is model:
                    order.leave_model()
            return output

        setattr(module, name, followed)

    # Hooks on outputs run in the order in which they are set: these before torch's, which gather a unit.
    for module in (*units, model):
        module.register_forward_hook(reach, prepend=True)
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)
    for unit in units:
        unit.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    for module, names in plan.find_forward_methods().items():
        for name in names:
            follow(module, name)
    return order


def _set_forward(module: nn.Module, ahead: list[nn.Module]) -> None:
    as_fsdp(module).set_modules_to_forward_prefetch([as_fsdp(unit) for unit in ahead])


def _set_backward(module: nn.Module, ahead: list[nn.Module]) -> None:
    # An empty list would mean FSDP2's default, the unit before; a unit that is gathered already means none.
    as_fsdp(module).set_modules_to_backward_prefetch([as_fsdp(unit) for unit in ahead or [module]])
