"""The settings that PyTorch FSDP2 has beyond those of every wrapper that shards parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..base.megatron_names import takes_megatron_fields
from .distributed_data_parallel_config import DistributedDataParallelConfig, Engine, shards_parameters
from .fully_sharded_data_parallel_config import FullyShardedDataParallelConfig


@takes_megatron_fields
@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardedDataParallelConfig):
    """Settings of :class:`TorchFullyShardedDataParallel`. Giving one to `wrap_model` chooses that wrapper.

    Dtypes are torch's, or their names, as ``"bf16"`` or ``"float32"``.

    Raises:
        ParallelConfigError: settings that contradict each other, or a value that a setting does not take.
    """

    collectives: Literal["auto", "torch"] = "auto"
    """``auto``: as the backend does them best. Under gloo ranks exchange pieces directly. ``torch``: FSDP2's own."""

    @property
    def engine(self) -> Engine:
        return Engine.FSDP2


NOT_OF_FSDP2: dict[str, tuple[tuple[Any, ...], str]] = {
    "reduce_scatter_with_fp32_accumulation": (
        (),
        "which adds fp16 and bf16 gradients in fp32 while it sends them as they are, and FSDP2 cannot; drop it, or "
        "set grad_reduce_in_fp32, which sends them in fp32",
    ),
    "param_name_patterns_for_fp32_local_accumulation": (
        (),
        "which adds up gradients in fp32 before they are reduced in their own precision, and FSDP2 cannot; drop it, "
        "or set grad_reduce_in_fp32",
    ),
    "outer_dp_sharding_strategy": (
        ("no_shard",),
        "and FSDP2 replicates shards over optimizer instances; drop it, or use FullyShardedDataParallel",
    ),
    "shard_cut": (("auto", "rows"), "and FSDP2 always cuts by rows; drop it, or use FullyShardedDataParallel"),
    "shard_cut_overrides": ((), "and FSDP2 always cuts by rows; drop it, or use FullyShardedDataParallel"),
}
"""Values of settings that FSDP2 takes, in addition to empty ones, and what is wrong with the others."""


def config_class(use_torch_fsdp2: bool, sharding_strategy: str) -> type[DistributedDataParallelConfig]:
    """Returns the class of the settings of FSDP2, or of a strategy on flat buffers."""
    if use_torch_fsdp2:
        return TorchFullyShardedDataParallelConfig
    return FullyShardedDataParallelConfig if shards_parameters(sharding_strategy) else DistributedDataParallelConfig
