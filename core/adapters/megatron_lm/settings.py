"""Settings of FSDP2 wrappers: fields of Megatron-LM's config, and what was registered."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields
from typing import Any

from ... import distributed
from ...base.errors import ParallelConfigError
from ...base.megatron_names import changed_fields
from ...base.text import choices
from ...distributed import TorchFullyShardedDataParallelConfig

registered_settings: dict[str, Any] = {}
"""Fields of `TorchFullyShardedDataParallelConfig` for every FSDP2 wrapper that is constructed from now on. `register`
sets them, for what no flag of Megatron-LM carries to the wrapper."""


def translate_config(ddp_config: Any) -> TorchFullyShardedDataParallelConfig:
    """Returns the settings of a wrapper: what a config of Megatron-LM changes, attributes that were set on it besides,
    and what was registered.

    Raises:
        ParallelConfigError: both set a field, to different values; or FSDP2 cannot honour one, or does not know it.
    """
    values = changed_fields(ddp_config)
    if not isinstance(ddp_config, distributed.DistributedDataParallelConfig):
        check_known(values.keys() - {field.name for field in fields(ddp_config)}, "Megatron-LM's settings were given")
    for name, value in registered_settings.items():
        if values.get(name, value) != value:
            raise ParallelConfigError(
                f"{name} is {values[name]!r} in Megatron-LM's settings and {value!r} in register(); give it once"
            )
    return TorchFullyShardedDataParallelConfig(**(values | registered_settings))


def check_known(names: Set[str], what: str) -> None:
    allowed = {field.name for field in fields(TorchFullyShardedDataParallelConfig)}
    for name in names - allowed:
        raise ParallelConfigError(f"{what} {name}, which is no setting of FSDP2; {choices(name, allowed)}")
