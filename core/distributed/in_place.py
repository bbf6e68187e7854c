"""A model sharded in place, for callers who keep the model itself and not a wrapper around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from .. import device
from .composition import ActivationCheckpointing, prepare_units
from .explain.plain_state_dicts import reject_plain_state_dicts
from .explain.recorded_fsdp_collectives import record_fsdp_collectives
from .explain.structure import reject_different_models
from .fsdp_state import complete_accumulated_gradients, drop_pending_gathers, free_partial_shards
from .initial_values import InitialValues
from .mesh_axes import MeshAxes
from .resharding import Reshard
from .sharding import fsdp_modules, shard_model
from .units import Unit, UnitChoice, plan_units
from .warn import warn_once


def shard_in_place(
    module: nn.Module,
    axes: MeshAxes,
    unit_classes: Iterable[UnitChoice],
    *,
    caller: str,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: ActivationCheckpointing = "none",
    reshard_after_forward: Reshard = True,
    reshard_overrides: Sequence[tuple[str, Reshard]] = (),
    sync_module_states: bool = True,
) -> list[Unit]:
    """What `TorchFullyShardedDataParallel` does to the model that it wraps, in the same order and by the same parts.

    The model's own forward frees, where no backward follows, what FSDP2 leaves gathered for one.

    Args:
        module: the model, on any device; its parameters may be DTensors of tensor parallelism already.
        axes: what to shard over.
        unit_classes: as `plan_units` takes them.
        caller: the function that the user called, for messages.
        mp_policy: as torch's; None casts nothing.
        offload_policy: as torch's; memory is pinned only where there is an accelerator to pin it for.
        activation_checkpointing: as in `prepare_units`.
        reshard_after_forward: as in `shard_model`.
        reshard_overrides: as in `shard_model`.
        sync_module_states: all start from the values of the first rank.

    Returns:
        The units, as they became.
    """
    offload_policy = usable_offload_policy(offload_policy)
    units = plan_units(module, unit_classes)
    reject_different_models(
        module,
        axes.group,
        wrapper=caller,
        config=None,
        ddp_config=mp_policy or MixedPrecisionPolicy(),
        units=[unit.names for unit in units],
        settings={
            "offload_policy": type(offload_policy).__name__,
            "activation_checkpointing": activation_checkpointing,
            "reshard_after_forward": reshard_after_forward,
            "reshard_overrides": list(reshard_overrides),
        },
    )
    start = InitialValues(module, axes.group, from_first_rank=sync_module_states)
    start.equalize()
    prepare_units(units, activation_checkpointing=activation_checkpointing)
    units = shard_model(
        module,
        axes.data,
        units,
        reshard_after_forward=reshard_after_forward,
        reshard_overrides=reshard_overrides,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    start.fill("cpu" if isinstance(offload_policy, CPUOffloadPolicy) else None)
    reject_plain_state_dicts(module)
    record_fsdp_collectives(module)
    let_be_called_directly(module)
    return units


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Whether backwards of a model that was sharded in place reduce gradients, or let them add up on each rank."""
    if enabled:
        complete_accumulated_gradients(module)
    for submodule in fsdp_modules(module):
        submodule.set_requires_gradient_sync(enabled, recurse=False)


def usable_offload_policy(policy: OffloadPolicy | None) -> OffloadPolicy | None:
    """The same, without pinned memory on a machine that has no accelerator, where torch would fail."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and device.device_type() == "cpu":
        warn_once(
            "pin_memory is set, but there is no accelerator that memory could be pinned for; shards lie in ordinary "
            "memory. No number changes"
        )
        return CPUOffloadPolicy(pin_memory=False)
    return policy


def let_be_called_directly(module: nn.Module) -> None:
    """Lets a sharded model be called, and generate text, without a wrapper around it.

    Its own forward frees, where no backward follows, what stays gathered for one, as the wrapper's does: else the next
    forward would compute with old parameters. By the mark that it gets, Hugging Face's ``generate`` lets ranks whose
    text has ended go on until all have.
    """
    module.register_forward_hook(_free)
    module._is_fsdp_managed_module = True  # type: ignore[assignment]


def _free(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() or not isinstance(module, FSDPModule):
        return
    drop_pending_gathers(module)
    for submodule in fsdp_modules(module):
        submodule.reshard()
    free_partial_shards(module)
