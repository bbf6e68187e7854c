"""Settings of FSDP2 wrappers: fields of Megatron-LM's config, and what was registered. Lines for Megatron-LM's log."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from ...base.errors import ParallelConfigError
from ...base.megatron_names import changed_fields
from ...distributed import TorchFullyShardedDataParallelConfig
from ...distributed.distributed_data_parallel_config import EngineKind
from ...distributed.plan.settings import own_settings

registered_settings: dict[str, Any] = {}
"""Fields of `TorchFullyShardedDataParallelConfig` for every FSDP2 wrapper that is constructed from now on. `register`
sets them, for what no flag of Megatron-LM carries to the wrapper."""


def translate_config(ddp_config: Any) -> TorchFullyShardedDataParallelConfig:
    """Returns the settings of a wrapper: what a config of Megatron-LM changes, attributes that were set on it besides,
    and what was registered.

    Raises:
        ParallelConfigError: both set a field, to different values; or FSDP2 cannot honour one, or does not know it.
    """
    values = changed_fields(own_settings(ddp_config, EngineKind.FSDP2))
    for name, value in registered_settings.items():
        if values.get(name, value) != value:
            raise ParallelConfigError(
                f"{name} is {values[name]!r} in Megatron-LM's settings and {value!r} in register(); give it once"
            )
    return TorchFullyShardedDataParallelConfig(**(values | registered_settings))


def print_first(line: str) -> None:
    """Prints a line of Megatron-LM's log on the first rank."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"> {line}\n")
        sys.stdout.flush()
