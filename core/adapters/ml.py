"""The data-parallel trainer mixin of the `ml` project: its `ParallelConfig` becomes this library's wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from ..base import device
from ..base.errors import ConfigError, warn_once
from ..base.text import choices
from ..distributed import _BaseDataParallel
from ..distributed.fully_sharded_data_parallel_config import FSDP2, config_of
from ..distributed.plan.units import CONTAINERS
from ..rendezvous.environment import environment_int
from .bridge.sharding import data_parallel_mesh
from .bridge.translation import Replicas, check_settings, wrap_for_trainer

T = TypeVar("T", bound=nn.Module)

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_FREES_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
UNDEFINED_NAME = "???"
"""The value of a field that has to be given, in that project's configs."""


@dataclass
class ParallelConfig:
    """Settings of data parallelism.

    Raises:
        ConfigError: an unknown strategy.
    """

    use_fsdp: bool = False
    """Shard, instead of replicating."""

    cpu_offload: bool = False
    """Keep shards in the host's memory."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.HYBRID_SHARD
    """Torch's, or its name: over all data-parallel ranks, or within machines (``LOCAL_WORLD_SIZE``)."""

    sync_module_states: bool = True
    """Begin with the first rank's values."""

    def __post_init__(self) -> None:
        if not isinstance(self.sharding_strategy, ShardingStrategy):
            by_name = {name.removeprefix("_"): member for name, member in ShardingStrategy.__members__.items()}
            name = str(getattr(self.sharding_strategy, "value", self.sharding_strategy)).removeprefix("_")
            if name not in by_name:
                raise ConfigError(f"sharding_strategy is {name!r}; {choices(name, by_name)}")
            self.sharding_strategy = by_name[name]


class TaskModel(nn.Module):
    """A task's step as a module, so that a data-parallel wrapper around it sees one forward."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Any, state: Any) -> Any:
        """Returns the loss of a batch, with the task's hooks around the model's run."""
        self.task.on_before_forward_step(self.model, batch, state)
        output = self.task.run_model(self.model, batch, state)
        self.task.on_after_forward_step(self.model, batch, output, state)
        loss = self.task.compute_loss(self.model, batch, state, output)
        self.task.on_after_compute_loss(self.model, batch, output, loss, state)
        return loss


def ddp(model: nn.Module, cfg: ParallelConfig) -> _BaseDataParallel:
    """Wraps replicas over the data-parallel ranks. Gradients are in ``param.grad`` after backward."""
    check_settings(cfg, "ml replicated")
    return Replicas(model, data_parallel_mesh(None, hybrid=False))


def fsdp(model: nn.Module, cfg: ParallelConfig) -> _BaseDataParallel:
    """Returns the model sharded over the data-parallel ranks. Every item of its module lists is a unit."""
    mesh = data_parallel_mesh(None, hybrid=cfg.sharding_strategy in _HYBRID)
    if cfg.sharding_strategy is ShardingStrategy.NO_SHARD:
        check_settings(cfg, "ml NO_SHARD")
        return Replicas(model, mesh)
    config = config_of(
        FSDP2,
        reshard_after_forward=cfg.sharding_strategy in _FREES_AFTER_FORWARD,
        cpu_offload=cfg.cpu_offload,
        sync_module_states=cfg.sync_module_states,
    )
    return wrap_for_trainer(model, config, mesh, CONTAINERS)


def dp(model: T, cfg: ParallelConfig) -> T | _BaseDataParallel:
    """Returns the model sharded or replicated, as the config says. Unchanged on one rank (by ``WORLD_SIZE``)."""
    if environment_int("WORLD_SIZE", 1) <= 1:
        return model
    return fsdp(model, cfg) if cfg.use_fsdp else ddp(model, cfg)


@dataclass
class TrainerParallelConfig:
    """The fields of a trainer's config that `ParallelMixin` reads."""

    name: str = UNDEFINED_NAME
    """Name of the trainer, and of the experiment where `exp_name` is not given."""

    exp_name: str | None = None
    """Name of the experiment, and of its folder."""

    exp_dir: str | None = None
    """The folder of experiments, by default the working directory."""

    log_dir_name: str = "logs"
    """The folder of logs, in the experiment's."""

    use_double_weight_precision: bool = False
    """Weights in fp64, instead of fp32."""

    checkpoint: Any = None
    """The trainer's own settings of checkpoints."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Settings of data parallelism."""


class ParallelMixin:
    """Mixed into a trainer with a `config` (`TrainerParallelConfig`): builds its data-parallel task model.

    The trainer may have a ``_device`` with ``_get_device()`` and a ``_weight_precision``, as that project's do; else
    the device is this process's, and the precision the config's.
    """

    config: TrainerParallelConfig

    @property
    def exp_dir(self) -> Path:
        """The experiment's folder.

        Raises:
            ConfigError: the config names neither the experiment nor the trainer.
        """
        name = self.config.exp_name or self.config.name
        if name == UNDEFINED_NAME:
            raise ConfigError("the trainer's config has neither name nor exp_name; give one, which names its folder")
        return Path(self.config.exp_dir or Path.cwd()) / name

    @property
    def log_dir(self) -> Path:
        """Folder for log files, inside `exp_dir`."""
        return self.exp_dir / self.config.log_dir_name

    def _get_task_model(self, task: Any, model: nn.Module) -> nn.Module:
        """Returns task and model as one module, made data parallel, on the weights' device and in their precision."""
        if self.config.checkpoint is not None:
            warn_once("TrainerParallelConfig.checkpoint is for the trainer: ParallelMixin saves and loads nothing")
        own = getattr(self, "_device", None)
        where = device.current_device() if own is None else own._get_device()
        by_config = torch.float64 if self.config.use_double_weight_precision else torch.float32
        dtype = getattr(self, "_weight_precision", by_config)
        init: Callable[..., Any] | None = getattr(model, "init", None)
        if callable(init):
            init(where, dtype)
        else:
            model.to(where, dtype)
        if isinstance(task, nn.Module):
            task.to(where, dtype)
        return dp(TaskModel(task, model), self.config.parallel)
