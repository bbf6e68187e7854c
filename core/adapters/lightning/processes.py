"""The common base of the strategies for Trainer and Fabric: arguments, wrapping, starting ranks, and collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only_of_utilities
from torch import nn

from ... import device
from ...distributed import DistributedDataParallelConfig, _BaseDataParallel, wrap_model
from ...distributed.parameter_owner import owner_of
from ...distributed.plan.units import UnitChoice
from ...errors import ConfigError, WrapError
from ...text import choices
from ...warn import warn_once
from ..bridge.meshes import world_mesh
from ..bridge.trained import Trained
from ..bridge.units import units_by_class
from ..bridge.wrapping import FSDP2, STRATEGIES, config_of

T = TypeVar("T")

Units = Sequence[type[nn.Module] | str]
"""Classes, or their names, plain or dotted."""

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Processes:
    """A rank for each device of each node: methods that both of Lightning's kinds of parallel strategy have to define.

    Mixed in before a `ParallelStrategy`. A process group that exists already, as under Ray Train, is used as it is.

    Its arguments are described in `ShardstackStrategy`.
    """

    cluster_environment: ClusterEnvironment | None
    parallel_devices: list[torch.device] | None
    local_rank: int
    node_rank: int
    global_rank: int
    num_nodes = 1
    """Set by the Trainer, or by Fabric."""

    launcher_class: type[Any]
    """Starts the other ranks of this node, where no launcher has; Lightning's, of the Trainer or of Fabric."""

    def __init__(
        self,
        sharding: str | DistributedDataParallelConfig = FSDP2,
        *,
        units: Units | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **lightning: Any,
    ) -> None:
        self.settings = sharding_config(sharding)
        self.units = units
        self.process_group_backend = process_group_backend
        self.process_group_timeout = timeout
        strategy: Any = super()
        strategy.__init__(**lightning)

    @property
    def is_distributed(self) -> bool:
        """True: there is a process group."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if not self.parallel_devices:
            raise ConfigError("the strategy has no devices yet; give it to a Trainer or a Fabric, which assigns them")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the samples is this rank's: every rank is a data-parallel one."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            # Lightning's attribute: it calls this before ranks start, and launches by it.
            self._launcher = self.launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Joins the process group."""
        strategy: Any = super()
        strategy.setup_environment()
        self.join_process_group()

    def move(self, module: nn.Module) -> None:
        """Moves a module to this rank's device, unless it is on the meta device, from which wrapping takes it."""
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(self.root_device)

    def set_world_ranks(self) -> None:
        """Derives this process's rank from its node and place there."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Attributes of Lightning's functions, for the whole process: they decide which rank prints and logs.
        rank_zero_only.rank = rank_zero_only_of_utilities.rank = self.global_rank

    def join_process_group(self) -> None:
        """Joins the default process group, unless it exists.

        Raises:
            ConfigError: a device that there are no collectives for, or a process group for another one.
        """
        kind = self.root_device.type
        if kind not in _BACKENDS:
            raise ConfigError(f"the strategy got the device {self.root_device}; it takes accelerator='cpu' or 'cuda'")
        self.set_world_ranks()
        if "RANK" in os.environ and self.process_group_backend is None and device.device_type() == kind:
            device.init_process_group(self.process_group_timeout.total_seconds() / 60)  # also after a restart
        _init_dist_connection(  # which does nothing where there is a group
            self.cluster_environment,
            self.process_group_backend or _BACKENDS[kind],
            timeout=self.process_group_timeout,
            device_id=self.root_device if kind == "cuda" else None,
        )
        if device.device_type() != kind:
            raise ConfigError(
                f"the process group is {dist.get_backend()}, which carries {device.device_type()} tensors, and the "
                f"model is on {self.root_device}; use accelerator={device.device_type()!r}, or another backend"
            )

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            device.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank `src` on every rank."""
        if not dist.is_initialized():
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns a tensor reduced over ranks; anything else as it is."""
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Calls `all_reduce`, by the Trainer's name."""
        return self.all_reduce(tensor, group, reduce_op)


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


def wrap(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> Trained:
    """Wraps a model over all ranks, or takes the wrapper that it has, if that has equal settings.

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
        return Trained(wrapper)
    mesh = world_mesh(settings.num_distributed_optimizer_instances)
    chosen = _units(module, settings, units)
    return Trained(wrap_model(module, SimpleNamespace(), settings, process_group=mesh, sub_modules_to_wrap=chosen))


def _units(module: nn.Module, settings: DistributedDataParallelConfig, units: Units | None) -> list[UnitChoice]:
    if units is not None:
        listed = ([unit] if isinstance(unit, type) else units_by_class(module, unit, "units") for unit in units)
        return [kind for kinds in listed for kind in kinds]
    try:
        return list(units_by_class(module, None, "units"))
    except WrapError as error:
        if settings.shards_parameters:
            warn_once(f"{error}. Until then the whole model is one unit, gathered at once")
        return []


def trained_of(module: nn.Module) -> Trained:
    """Returns a wrapped model, by its wrapper or the module inside.

    Raises:
        ConfigError: it is not wrapped.
    """
    wrapper = module if isinstance(module, _BaseDataParallel) else owner_of(next(module.parameters(), None))
    if not isinstance(wrapper, _BaseDataParallel):
        raise ConfigError(
            f"{type(module).__name__} is not wrapped; give it to fabric.setup or fabric.setup_module first"
        )
    return Trained.of(wrapper) or Trained(wrapper)
