"""`ShardstackEngineConfig`: verl's config of the FSDP engine, with a sharding strategy of this library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from verl.workers.config import EngineConfig, FSDPEngineConfig

from ...base.dtypes import as_dtype
from ...base.errors import ConfigError
from ...base.text import choices
from ...distributed.fully_sharded_data_parallel_config import config_class
from ..accelerate.prepared import ShardstackPlugin
from ..bridge.translation import check_settings

BACKEND = "shardstack"
"""verl's name of the engine, and the ``strategy`` that picks it."""
_PRECISIONS = {"param_dtype": ("bf16", "fp32"), "reduce_dtype": ("fp32",), "buffer_dtype": ("fp32",)}
"""What verl's ``mixed_precision`` may be here, the default first."""


@dataclass
class ShardstackEngineConfig(FSDPEngineConfig):
    """Settings of the engine ``shardstack``. verl builds it where a config names it as ``_target_``.

    Raises:
        ConfigError: a strategy or setting that the wrapper does not have.
        ParallelConfigError: a setting of verl's FSDP engine that has no counterpart here.
    """

    strategy: str = BACKEND

    sharding_strategy: str = "optim_grads_params"
    """``no_shard``, ``optim``, ``optim_grads``, ``optim_grads_params`` or ``fsdp2``, as of `ShardstackPlugin`."""

    hybrid: bool = False
    """Shard within machines (``LOCAL_WORLD_SIZE`` ranks), replicate across them."""

    transformer_cls_names_to_wrap: Any = None
    """Names of the classes that are units. None: those that the model declares whole."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the wrapper's config, as ``{"cpu_offload": True}``."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # not that of FSDP, which knows its own strategies alone
        if self.strategy != BACKEND:
            raise ConfigError(f"strategy is {self.strategy!r}, and the engine of this config is {BACKEND!r}; drop it")
        if self.qat.enable:
            raise ConfigError("qat.enable is set, and weights are not quantised in training here; drop it")
        if self.router_replay.mode != "disabled":
            raise ConfigError(f"router_replay.mode is {self.router_replay.mode!r}; this engine replays none, drop it")
        check_settings(self, "verl")
        _ = self.compute_dtype, self.plugin()

    def plugin(self) -> ShardstackPlugin:
        """Returns what wraps the model.

        Raises:
            ConfigError: as of the class.
        """
        given: dict[str, Any] = {"grad_reduce_in_fp32": True}
        if not config_class(self.sharding_strategy, "sharding_strategy")().shards_parameters:
            check_settings(self, "verl replicated")
        else:
            given["reshard_after_forward"] = self.reshard_after_forward
            given["param_dtype"] = None if self.compute_dtype == torch.float32 else self.compute_dtype
        given |= {"transformer_cls_names_to_wrap": self.transformer_cls_names_to_wrap, "hybrid": self.hybrid}
        return ShardstackPlugin(self.sharding_strategy, **given | dict(self.settings))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of ``mixed_precision``: what is computed in, and gathered where parameters are sharded.

        Raises:
            ConfigError: a field or dtype of it that this engine does not have.
        """
        precision = {name: allowed[0] for name, allowed in _PRECISIONS.items()} | dict(self.mixed_precision or {})
        for name, value in precision.items():
            if name not in _PRECISIONS:
                raise ConfigError(f"mixed_precision has {name!r}; {choices(name, _PRECISIONS)}")
            if as_dtype(value, name) not in map(as_dtype, _PRECISIONS[name]):
                raise ConfigError(f"mixed_precision.{name} is {value!r}; {choices(str(value), _PRECISIONS[name])}")
        return cast(torch.dtype, as_dtype(precision["param_dtype"]))
