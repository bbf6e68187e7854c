"""`shard_model`: the only place that calls torch's `fully_shard`, in the order that a wrap takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..._torch_compat import reduce_parameters_without_gradient
from ...comm.gloo import exchanges_directly
from ...diagnostics.stale_optimizers import replaced_parameters_marked
from ...errors import WrapError
from ..model.rewrapping import note_sharded, reject_wrapped
from ..model.unfit_models import reject_unfit, reject_unfit_for_fsdp2
from ..model.units import Unit, parameter_attributes_kept
from ..resharding import Reshard, check_reshard, reshard_of
from .direct_collectives import DirectAllGather, DirectReduceScatter
from .exchanged_units import exchange_directly
from .torch_private import PartialReshard, keep_changes_of_requires_grad, tolerate_units_never_gathered


def shard_model(
    module: nn.Module,
    mesh: DeviceMesh,
    planned: Sequence[Unit],
    *,
    reshard_after_forward: Reshard = True,
    reshard_overrides: Sequence[tuple[str, Reshard]] = (),
    gathers_ahead: bool = True,
    collectives: str = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    averages_gradients: bool = True,
) -> list[Unit]:
    """Shards a model in place, unit by unit and then the root, and returns the units as they became.

    Parameters become DTensors, cut on dim 0 over the mesh's last axis and replicated over its first where it has two,
    with the custom attributes that they had. The last unit and the root stay gathered between forward and backward,
    and a unit whose backward reads no weight is not gathered for it. A parameter that no backward reached has a zero
    gradient, as under replication.

    Args:
        module: the model, equal on all ranks (`InitialValues`); parameters on the meta device stay there, sharded.
        mesh: ``(shard,)``, or ``(replicate, shard)`` for hybrid sharding.
        planned: its units, from `plan_units`.
        reshard_after_forward: free gathered parameters between forward and backward; see `resharding`.
        reshard_overrides: pairs of a pattern of module names and another value.
        gathers_ahead: units are gathered while others compute, on CPU too; see `Prefetcher`.
        collectives: ``auto`` or ``torch``; see `fsdp_collectives`.
        mp_policy: dtypes of compute, reduction and output; the latter is the root's alone, as with `Float16Module`.
        offload_policy: where shards are kept.
        averages_gradients: divide by the number of ranks; otherwise sum.

    Raises:
        WrapError: the model is sharded already, or has a parameter that cannot be cut.
        ParallelConfigError: a number of ranks to reshard to that does not divide the shard size.
    """
    _reject_what_cannot_be_sharded(module)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    sharder = _Sharder(mesh, reshard_after_forward, reshard_overrides, offload_policy or OffloadPolicy())
    inner_policy = replace(mp_policy, output_dtype=None)
    with parameter_attributes_kept(module), replaced_parameters_marked(module):
        last = next((unit for unit in reversed(planned) if not unit.is_minority), None)
        units = [sharder.shard(unit, inner_policy, stays_gathered=unit is last) for unit in planned]
        sharder.shard(Unit((module,), ("",)), mp_policy, stays_gathered=True)
    note_sharded(fsdp_modules(module))
    tolerate_units_never_gathered(module)
    keep_changes_of_requires_grad(module)
    for unit in units:
        if not unit.is_needed_in_backward:
            for member in unit.modules:
                _as_fsdp(member).set_unshard_in_backward(False)
    has_direct_exchange = collectives == "auto" and exchanges_directly(
        mesh.get_group(-1), torch.device(mesh.device_type)
    )
    for submodule in fsdp_modules(module):  # a setting of FSDP2 acts on one module
        reduce_parameters_without_gradient(submodule)
        if not averages_gradients:
            # A factor other than the number of ranks is PREMUL_SUM, which gloo refuses, unless a sum is forced.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
        if has_direct_exchange:
            submodule.set_custom_all_gather(DirectAllGather())
            exchange_directly(submodule)
            submodule.set_custom_reduce_scatter(DirectReduceScatter())
        if mesh.device_type == "cpu" and gathers_ahead:
            submodule._set_unshard_async_op(True)  # elsewhere streams make gathers asynchronous
    return units


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Every module that torch's `fully_shard` has been applied to, the root first."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


class _Sharder:
    """Applies `fully_shard` to one unit after the other, with what all of them share."""

    def __init__(
        self,
        mesh: DeviceMesh,
        reshard_after_forward: Reshard,
        reshard_overrides: Sequence[tuple[str, Reshard]],
        offload_policy: OffloadPolicy,
    ) -> None:
        self._mesh = mesh
        self._default, self._overrides = reshard_after_forward, reshard_overrides
        self._offload_policy = offload_policy
        self._partial: dict[int, PartialReshard] = {}

    def shard(self, unit: Unit, mp_policy: MixedPrecisionPolicy, *, stays_gathered: bool) -> Unit:
        """Shards it, and returns it with what becomes of it after its forward."""
        default = False if stays_gathered else self._default
        reshard = check_reshard(reshard_of(unit.names[0], default, self._overrides), self._mesh.get_group(-1).size())
        if not unit.is_needed_in_backward:
            reshard = reshard is not False  # nothing would gather again what a number keeps
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            mesh=self._mesh,
            reshard_after_forward=reshard is not False,
            mp_policy=mp_policy,
            offload_policy=self._offload_policy,
        )
        if not isinstance(reshard, bool):
            if reshard not in self._partial:
                self._partial[reshard] = PartialReshard(self._mesh.get_group(-1), reshard, self._mesh.device_type)
            self._partial[reshard].apply_to(unit.modules[0])
        return replace(unit, reshard_after_forward=reshard)


def _as_fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise WrapError(f"{type(module).__name__} is not sharded")
    return module


def _reject_what_cannot_be_sharded(module: nn.Module) -> None:
    reject_wrapped(module)
    reject_unfit(module)
    reject_unfit_for_fsdp2(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise WrapError(f"parameter {name} lies on a mesh of {parameter.device_mesh.ndim} axes already")
