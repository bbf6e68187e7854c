"""The fields that plans have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ... import device
from ...comm import streams
from ...dtypes import as_dtype
from ...errors import warn_once
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..engine import engine_of
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
from ..groups import DataParallelGroups
from .reproducible import check_reproducible
from .values import GradientReduction

_MAY_DIFFER = frozenset({"check_for_nan_in_grad", "check_for_large_grads", "pin_memory"})
"""Settings that concern a rank alone."""

_FIELDS_OF_MODEL_CONFIG = ("bf16", "fp16", "calculate_per_token_loss", "gradient_accumulation_fusion")


Settings = TypeVar("Settings", bound=DistributedDataParallelConfig)


def settings_as(kind: type[Settings], ddp_config: DistributedDataParallelConfig) -> Settings:
    """Converts settings to `kind`: unchanged if they are of that kind, else with its defaults for missing fields."""
    if isinstance(ddp_config, kind):
        return ddp_config
    own = ("data_parallel_sharding_strategy", "use_distributed_optimizer")
    shared = {f.name: getattr(ddp_config, f.name) for f in fields(DistributedDataParallelConfig) if f.name not in own}
    return kind(**shared)


def common_plan(
    config: Any,
    settings: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    *,
    caller: str,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the fields of a plan that follow from any settings.

    Args:
        config: the model's config, any object; absent fields take their defaults.
        given: arguments of the caller in addition to the settings, which have to be equal on all ranks.
    """
    sums = getattr(config, "calculate_per_token_loss", False)
    check_reproducible(config, settings, groups)
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    changed = {f.name: values[f.name] for f in fields(settings) if values[f.name] != f.default}
    return {
        "caller": caller,
        "engine": engine_of(settings),
        "strategy": settings.sharding_strategy,
        "groups": groups,
        "reduction": GradientReduction.SUM if sums else GradientReduction.MEAN,
        "reduces_every_micro_batch": settings.reduce_every_micro_batch,
        "checks_for_nan": settings.check_for_nan_in_grad,
        "checks_for_large": settings.check_for_large_grads,
        "broadcasts_buffers": settings.broadcast_buffers,
        "is_reproducible": settings.reproducible_across_ranks,
        "settings": (
            ("the wrapper", caller),
            *((f"the setting {name}", repr(value)) for name, value in values.items() if name not in _MAY_DIFFER),
            *((f"the setting {name}", repr(value)) for name, value in (given or {}).items()),
            *(
                (f"the model's setting {name}", repr(bool(getattr(config, name, False))))
                for name in _FIELDS_OF_MODEL_CONFIG
            ),
        ),
        "changed_settings": ", ".join(f"{name}={value}" for name, value in changed.items()),
        "tensor_parallel_size": getattr(config, "tensor_model_parallel_size", 1),
        "context_parallel_size": getattr(config, "context_parallel_size", 1),
    }


def gathering_plan(settings: FullyShardedDataParallelConfig) -> dict[str, Any]:
    """Returns those of a plan that gathers units before use."""
    return {
        "forward_prefetch": settings.forward_prefetch,
        "backward_prefetch": settings.backward_prefetch,
        "offloads": settings.cpu_offload,
        "pins_memory": _pins_memory(settings),
        "registers_memory": settings.nccl_ub,
        "equalizes": settings.sync_module_states,
        "buffer_dtype": as_dtype(settings.buffer_dtype),
        "forward_methods": settings.forward_methods,
    }


def _pins_memory(settings: FullyShardedDataParallelConfig) -> bool:
    """Returns whether to pin offloaded shards. Warns if it was asked for without an accelerator."""
    asked = settings.cpu_offload and settings.pin_memory
    has_accelerator = streams.is_asynchronous(device.current_device())
    if asked and not has_accelerator:
        warn_once(
            "pin_memory is set, but there is no accelerator that memory could be pinned for; shards are in ordinary "
            "memory. No number changes"
        )
    return asked and has_accelerator
