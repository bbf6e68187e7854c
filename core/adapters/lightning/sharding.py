"""Wraps a strategy's model by its arguments, and finds and switches the wrapper of what Fabric passes around."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import torch.distributed as dist
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import device
from ...distributed import DistributedDataParallelConfig, _BaseDataParallel, wrap_model
from ...distributed.parameter_owner import owner_of
from ...distributed.plan.units import UnitChoice
from ...errors import ConfigError, ParallelConfigError, WrapError, warn_once
from ...text import choices
from ..bridge.units import units_by_class
from ..bridge.wrapping import STRATEGIES, config_of

Units = Sequence[type[nn.Module] | str]
"""Classes, or their names, plain or dotted."""


def sharding_config(sharding: str | DistributedDataParallelConfig) -> DistributedDataParallelConfig:
    """Returns the wrapper's settings for the name of a sharding; settings as they are.

    Raises:
        ConfigError: no such name, or settings that a trainer cannot honour.
    """
    if isinstance(sharding, DistributedDataParallelConfig):
        if sharding.reproducible_across_ranks:
            raise ConfigError(
                "reproducible_across_ranks is set, which needs samples dealt out by micro_batch_index, and "
                "Lightning's sampler deals them out by rank; drop it, or use core.training"
            )
        return sharding
    if sharding not in STRATEGIES:
        raise ConfigError(
            f"sharding is {sharding!r}; {choices(str(sharding), STRATEGIES)}, or a config of core.distributed"
        )
    return config_of(sharding)


def wrap(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> _BaseDataParallel:
    """Wraps a model over all ranks, or returns the wrapper that it has, if that has equal settings.

    Args:
        module: on this rank's device, or on the meta device.
        units: by default the layers that the model repeats.

    Raises:
        WrapError: the model is wrapped with other settings, or has no module of a class in `units`.
    """
    wrapper = owner_of(next(module.parameters(), None))
    if isinstance(wrapper, _BaseDataParallel) and wrapper.module is module:
        if wrapper.ddp_config != settings:
            raise WrapError(
                f"{type(module).__name__} is wrapped already, with another sharding than this strategy's; give it a "
                "strategy of equal settings, or build the model again"
            )
        return wrapper
    return wrap_model(
        module,
        SimpleNamespace(),
        settings,
        process_group=_mesh(settings.num_distributed_optimizer_instances),
        sub_modules_to_wrap=_units(module, settings, units),
    )


def _mesh(num_replicas: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if num_replicas == 1:
        return init_device_mesh(device.device_type(), (ranks,), mesh_dim_names=("dp_shard",))
    if ranks % num_replicas:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances is {num_replicas}, which does not divide {ranks} ranks; choose a "
            "divisor"
        )
    shape, names = (num_replicas, ranks // num_replicas), ("dp_replicate", "dp_shard")
    return init_device_mesh(device.device_type(), shape, mesh_dim_names=names)


def _units(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> list[UnitChoice]:
    if units is not None:
        found: list[UnitChoice] = []
        for unit in units:
            found.extend(units_by_class(module, unit, "units") if isinstance(unit, str) else [unit])
        return found
    try:
        return list(units_by_class(module, None, "units"))
    except WrapError as error:
        if settings.shards_parameters:
            warn_once(f"{error}. Until then the whole model is one unit, gathered at once")
        return []


class NoSync(_BackwardSyncControl):
    """Fabric's ``no_backward_sync``: `no_sync` of the wrapper, noted so that `backward` finishes no gradients."""

    def __init__(self) -> None:
        # Wrappers whose micro-batches accumulate at the moment; set and cleared by `no_backward_sync`.
        self.accumulating: set[nn.Module] = set()

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Lets gradients accumulate on this rank where `enabled`."""
        return self._entered(module) if enabled else nullcontext()

    @contextmanager
    def _entered(self, module: nn.Module) -> Iterator[None]:
        self.accumulating.add(module)
        try:
            with wrapper_of(module).no_sync():
                yield
        finally:
            self.accumulating.discard(module)


def wrapper_of(module: nn.Module) -> _BaseDataParallel:
    """Returns the wrapper of a module, or the module if it is one.

    Raises:
        ConfigError: it has none.
    """
    wrapper = module if isinstance(module, _BaseDataParallel) else owner_of(next(module.parameters(), None))
    if not isinstance(wrapper, _BaseDataParallel):
        raise ConfigError(
            f"{type(module).__name__} is not wrapped; give it to fabric.setup or fabric.setup_module first"
        )
    return wrapper
