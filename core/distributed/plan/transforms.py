"""Decides which units of a model are recomputed in backward, and which are compiled, under any wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ...base.errors import ParallelConfigError
from ...tensor_parallel.initialization import ParameterOwner
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from .parts import UnitTransform
from .units import UnitModules


def plan_transforms(
    units: Sequence[UnitModules], settings: DistributedDataParallelConfig
) -> tuple[UnitTransform, ...]:
    """Chooses the units whose activations are computed again in backward, and those that are compiled.

    Skips single-layer units (an embedding, a projection), where recomputing saves nothing, units whose backward reads
    no weight, and units nested in other units, which are transformed with them. Skipped units do not count for the
    interval.

    Raises:
        ParallelConfigError: a model that recomputes by itself as well (``recompute_granularity``); or no unit that it
            could be done to.
    """
    recomputes = settings.activation_checkpointing != "none"
    if not transforms_units(settings):
        return ()
    inside = {below for unit in units for module in unit.modules for below in module.modules() if below is not module}
    layers = [
        unit
        for unit in units
        if unit.is_needed_in_backward
        and not inside.issuperset(unit.modules)
        and not all(map(_is_one_layer, unit.modules))
    ]
    if not layers:
        raise ParallelConfigError(
            f"activation_checkpointing is {settings.activation_checkpointing!r} and compile_units "
            f"{settings.compile_units}, but no unit has more than one layer of weights; name the classes of the "
            "model's blocks in sub_modules_to_wrap"
        )
    if recomputes:
        _reject_own_recomputation(layers, settings.activation_checkpointing)
    recomputed = layers[:: settings.activation_checkpointing_interval] if recomputes else []
    return tuple(
        UnitTransform(
            modules=unit.modules,
            recomputes=settings.activation_checkpointing if unit in recomputed else "none",
            is_compiled=settings.compile_units,
            memory_budget=settings.activation_memory_budget,
        )
        for unit in layers
        if unit in recomputed or settings.compile_units
    )


def transforms_units(settings: DistributedDataParallelConfig) -> bool:
    """Returns whether settings ask for anything of `plan_transforms`."""
    return settings.activation_checkpointing != "none" or settings.compile_units


def _is_one_layer(module: nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())
    return is_torchs or isinstance(module, ParameterOwner)


def _reject_own_recomputation(units: Iterable[UnitModules], activation_checkpointing: str) -> None:
    for submodule in (below for unit in units for module in unit.modules for below in module.modules()):
        granularity = getattr(getattr(submodule, "config", None), "recompute_granularity", None)
        if granularity is not None:
            raise ParallelConfigError(
                f"activation_checkpointing is {activation_checkpointing!r} in the wrapper's settings and "
                f"recompute_granularity is {granularity!r} in the model's config: both would compute the same "
                "activations again; drop one of the two"
            )
