"""`ShardstackEngineConfig`: verl's config of the FSDP engine, with a sharding strategy of this library."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from verl.workers.config import EngineConfig, FSDPEngineConfig

from ...base.dtypes import as_dtype
from ...base.errors import ConfigError, check_choices
from ...base.text import choices
from ...distributed.fully_sharded_data_parallel_config import config_class
from ..accelerate.prepared import ShardstackPlugin
from ..bridge.translation import check_settings

BACKEND = "shardstack"
"""verl's name of the engine, and the ``strategy`` that picks it."""


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
        check_settings(self, "verl")
        check_settings(vars(self.qat), "verl qat", where=" in qat")
        _ = self.compute_dtype, self.plugin()

    def check_model(self, model_config: Any) -> None:
        """Raises for settings of a model that this engine does not have, or not with these of its own.

        Raises:
            ConfigError: Ulysses without flash attention, or ``router_replay`` without packed sequences.
            ParallelConfigError: a setting of verl's model that has no counterpart here.
        """
        check_settings(model_config, "verl model")
        degree, attention = self.ulysses_sequence_parallel_size, model_config.hf_config._attn_implementation
        if degree > 1 and "flash" not in str(attention):
            raise ConfigError(
                f"ulysses_sequence_parallel_size is {degree}, and verl exchanges heads in flash attention alone, not "
                f"in {attention!r}; install flash-attn and set model.override_config.attn_implementation to "
                "flash_attention_2, or set 1"
            )
        if self.router_replay.mode != "disabled" and not model_config.use_remove_padding:
            mode = self.router_replay.mode
            raise ConfigError(f"router_replay.mode is {mode!r}, which takes packed sequences; set use_remove_padding")

    def plugin(self) -> ShardstackPlugin:
        """Returns what wraps the model.

        Raises:
            ConfigError: as of the class.
        """
        given: dict[str, Any] = {"grad_reduce_in_fp32": True, "hybrid": self.hybrid}
        given["transformer_cls_names_to_wrap"] = self.transformer_cls_names_to_wrap
        if config_class(self.sharding_strategy, "sharding_strategy")().shards_parameters:
            given["reshard_after_forward"] = self.reshard_after_forward
            given["param_dtype"] = None if self.compute_dtype == torch.float32 else self.compute_dtype
        else:
            check_settings(self, "verl replicated")
        return ShardstackPlugin(self.sharding_strategy, **given | dict(self.settings))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of ``mixed_precision``: what is computed in, and gathered where parameters are sharded.

        Raises:
            ConfigError: a field or dtype of it that this engine does not have.
        """
        defaults = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        precision = SimpleNamespace(**defaults | dict(self.mixed_precision or {}))
        if unknown := sorted(vars(precision).keys() - defaults.keys()):
            raise ConfigError(f"mixed_precision has {unknown[0]!r}; {choices(unknown[0], defaults)}")
        names, fp32 = ("bf16", "bfloat16", "fp32", "float32"), ("fp32", "float32")
        check_choices(precision, param_dtype=names, reduce_dtype=fp32, buffer_dtype=fp32)
        return cast(torch.dtype, as_dtype(precision.param_dtype))
