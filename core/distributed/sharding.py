"""`shard_model`: the only place that calls torch's `fully_shard`, in the order that a wrap takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .._torch_compat import reduce_parameters_without_gradient
from ..errors import WrapError
from .broadcast import broadcast_tensors
from .units import Unit, parameter_attributes_kept, plan_units


def shard_model(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    unit_classes: Iterable[type[nn.Module]],
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    sync_module_states: bool = True,
    averages_gradients: bool = True,
    prepare: Callable[[list[Unit]], None] | None = None,
) -> list[Unit]:
    """Shards a model in place, unit by unit and then the root, and returns the units.

    Parameters become DTensors, cut on dim 0 over the mesh's last axis and replicated over its first where it has two,
    with the custom attributes that they had. The last unit and the root stay gathered between forward and backward,
    and a unit whose backward reads no weight is not gathered for it. A parameter that no backward reached has a zero
    gradient, as under replication.

    Args:
        module: the model; parameters on the meta device stay there, sharded.
        mesh: ``(shard,)``, or ``(replicate, shard)`` for hybrid sharding.
        unit_classes: see `plan_units`.
        reshard_after_forward: free gathered parameters between forward and backward.
        mp_policy: dtypes of compute, reduction and output; the latter is the root's alone, as with `Float16Module`.
        sync_module_states: broadcast the mesh's first rank's parameters and buffers before cutting them.
        prepare: called with the units before the first is sharded, as with `composition.prepare_units`.
        averages_gradients: divide by the number of ranks; otherwise sum.

    Raises:
        WrapError: the model is sharded already, or has a parameter that cannot be cut.
    """
    _reject_what_cannot_be_sharded(module)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    if sync_module_states:
        for group in reversed(mesh.get_all_groups()):  # within each instance, then across them
            broadcast_tensors([*module.parameters(), *module.buffers()], group)

    units = plan_units(module, unit_classes)
    if prepare is not None:
        prepare(units)
    inner_policy = replace(mp_policy, output_dtype=None)
    with parameter_attributes_kept(module):
        for unit in units:
            fully_shard(
                unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
                mesh=mesh,
                reshard_after_forward=reshard_after_forward and unit is not units[-1],
                mp_policy=inner_policy,
            )
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=mp_policy)
    for unit in units:
        if not unit.is_needed_in_backward:
            for member in unit.modules:
                _as_fsdp(member).set_unshard_in_backward(False)
    for submodule in fsdp_modules(module):  # a setting of FSDP2 acts on one module
        reduce_parameters_without_gradient(submodule)
        if not averages_gradients:
            # A factor other than the number of ranks is PREMUL_SUM, which gloo refuses, unless a sum is forced.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
    return units


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Every module that torch's `fully_shard` has been applied to, the root first."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def _as_fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise WrapError(f"{type(module).__name__} is not sharded")
    return module


def _reject_what_cannot_be_sharded(module: nn.Module) -> None:
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            where = f"its module {name!r}" if name else "it"
            raise WrapError(f"the model cannot be sharded again: {where} is sharded already; wrap the plain model")
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise WrapError(f"parameter {name} is a scalar, which cannot be cut; give it the shape (1,)")
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise WrapError(f"parameter {name} lies on a mesh of {parameter.device_mesh.ndim} axes already")
