"""`ShardstackPlugin`: chooses the wrapper of an accelerator's model, and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from ...base import device
from ...base.errors import ConfigError
from ...base.text import choices
from ...distributed import FullyShardedDataParallelConfig, _BaseDataParallel
from ...distributed.model.unfit_models import reject_wrapped
from ...distributed.plan.units import UnitChoice, transforms_units
from ..bridge.meshes import data_parallel_mesh
from ..bridge.translation import config_class, config_of, reject_reproducible, wrap_for_trainer
from ..bridge.units import units_by_class

_DECIDED_HERE = ("data_parallel_sharding_strategy", "use_distributed_optimizer", "num_distributed_optimizer_instances")


class ShardstackPlugin:
    """Chooses the wrapper of `use_shardstack`, and its settings.

    Args:
        sharding_strategy: ``no_shard`` (replicas), ``optim`` (ZeRO-1), ``optim_grads`` (ZeRO-2),
            ``optim_grads_params`` (ZeRO-3 on flat buffers), or ``fsdp2`` (ZeRO-3 on torch's `fully_shard`).
        transformer_cls_names_to_wrap: names of the classes that are units, by accelerate's name; by default those
            that the model declares whole (``_no_split_modules``), else the largest class in its lists of layers.
        hybrid: shard within machines (``LOCAL_WORLD_SIZE`` ranks), replicate across them.
        settings: any field of the wrapper's config: of `DistributedDataParallelConfig` for the first three, of
            `FullyShardedDataParallelConfig` and `TorchFullyShardedDataParallelConfig` for the others.

    Raises:
        ConfigError: an unknown strategy or setting, or settings that contradict each other.
    """

    def __init__(
        self,
        sharding_strategy: str = "optim_grads_params",
        *,
        transformer_cls_names_to_wrap: str | Iterable[str] | None = None,
        hybrid: bool = False,
        **settings: Any,
    ) -> None:
        kind = config_class(sharding_strategy, "sharding_strategy")
        if hybrid and sharding_strategy == "no_shard":
            raise ConfigError(
                "hybrid is set under no_shard, which shards nothing; drop it, or choose another strategy"
            )
        self.sharding_strategy = sharding_strategy
        names = transformer_cls_names_to_wrap
        self.unit_names = names if names is None or isinstance(names, str) else ",".join(names)
        self.hybrid = hybrid
        known = [field.name for field in dataclasses.fields(kind) if field.name not in _DECIDED_HERE]
        for name in settings:
            if name in _DECIDED_HERE:
                raise ConfigError(f"{name} is given, and sharding_strategy and hybrid decide it; drop it")
            if name not in known:
                raise ConfigError(
                    f"ShardstackPlugin({sharding_strategy!r}) has no setting {name!r}; {choices(name, known)}"
                )
        self.ddp_config = config_of(sharding_strategy, **settings)
        reject_reproducible(self.ddp_config)

    def wrap(self, model: nn.Module) -> _BaseDataParallel:
        """Wraps the model. Its gradients are summed over ranks, not averaged.

        Raises:
            WrapError: a model that is wrapped already, or a class that it has none of.
        """
        reject_wrapped(model, (_BaseDataParallel,))
        device.init_process_group()
        config = self.ddp_config
        if isinstance(config, FullyShardedDataParallelConfig):
            methods = (*config.forward_methods, *(("generate",) if hasattr(model, "generate") else ()))
            config = dataclasses.replace(
                config,
                forward_methods=tuple(dict.fromkeys(methods)),
                pin_memory=config.pin_memory and device.device_type() != "cpu",
            )
        ranks = data_parallel_mesh(None, hybrid=True) if self.hybrid else dist.group.WORLD
        wrapped = wrap_for_trainer(model, config, ranks, self._units(model), calculate_per_token_loss=True)
        if config.shards_parameters:
            # Hugging Face's `generate` reads it: ranks whose text has ended go on until all have.
            model._is_fsdp_managed_module = True  # type: ignore[assignment]
        return wrapped

    def _units(self, model: nn.Module) -> list[UnitChoice]:
        config = self.ddp_config
        if not (config.shards_parameters or transforms_units(config)):
            return []
        return list(units_by_class(model, self.unit_names, "transformer_cls_names_to_wrap"))
