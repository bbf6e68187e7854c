"""The settings of a wrapper as resolved for one model on its ranks, which engines read.

Only the modules of this folder read a wrapper's config: an engine finds the settings that it needs in `Plan.settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import nn

from ...base import device
from ...base.module_protocol import fusion_lends_memory
from ...comm import streams
from ..distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
from ..groups import DataParallelGroups

_MAY_DIFFER = frozenset({"check_for_nan_in_grad"})
"""Settings that concern a rank alone."""

_FIELDS_OF_MODEL_CONFIG = ("bf16", "fp16", "calculate_per_token_loss", "gradient_accumulation_fusion")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What engines read of a wrapper's config. A field has the name of the config's field, whose docstring holds here.

    None is resolved, and a setting without effect on this model and these ranks is off.
    """

    # ---- every wrapper

    check_for_nan_in_grad: bool = False
    broadcast_buffers: bool = False
    reduce_every_micro_batch: bool = False
    reproducible_across_ranks: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    lend_gradients: bool = False
    """Layers compute gradients in place: in the memory of buckets (`GradSlot.lend`), or under FSDP2 row by row."""
    layers_add_gradients: bool = False
    """Layers add to ``main_grad`` themselves, as Megatron-LM's do with their fused kernel."""
    sync_module_states: bool = True
    """Always set where parameters are whole on every rank."""

    # ---- on flat buffers

    finish_in_backward: bool = False
    """Each backward outside `no_sync` finishes gradients, as under torch's DDP, and leaves them in ``param.grad``."""

    # ---- where parameters are sharded

    forward_methods: tuple[str, ...] = ()
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    gather_skipped_units: bool = False
    cpu_offload: bool = False
    pins_memory: bool = False
    """Offloaded shards are in pinned memory, where there is an accelerator, so that copies overlap with compute."""
    nccl_ub: bool = False
    collectives: Literal["auto", "torch"] = "auto"


def resolve_settings(
    ddp_config: DistributedDataParallelConfig,
    config: Any,
    module: nn.Module,
    groups: DataParallelGroups,
    engine: EngineKind,
    finish_in_backward: bool = False,
) -> Settings:
    """Resolves the settings of a wrapper for a model and the ranks that replicate it.

    Args:
        ddp_config: the engine's own type of settings (`core.distributed.plan.contradictions`).
        config: the model's config, any object; absent fields take their defaults.
        finish_in_backward: the argument of `DistributedDataParallel`.
    """
    # A training forward of such a module, as of BatchNorm, changes its buffers by its own batch.
    has_statistics = any(getattr(submodule, "running_mean", None) is not None for submodule in module.modules())
    # Layers compute gradients in lent memory, unless ``gradient_accumulation_fusion`` is False. In a config of another
    # library, as Megatron-LM's, True says that layers add to ``main_grad`` themselves.
    is_fused = bool(getattr(config, "gradient_accumulation_fusion", True))
    adds_itself = hasattr(config, "gradient_accumulation_fusion") and not fusion_lends_memory(config)
    is_fsdp2 = engine is EngineKind.FSDP2
    overlaps_grads, overlaps_params = _overlaps(ddp_config, module, groups)
    settings = Settings(
        check_for_nan_in_grad=ddp_config.check_for_nan_in_grad,
        broadcast_buffers=has_statistics if ddp_config.broadcast_buffers is None else ddp_config.broadcast_buffers,
        reduce_every_micro_batch=ddp_config.reduce_every_micro_batch and (is_fsdp2 or groups.shard.size() > 1),
        reproducible_across_ranks=ddp_config.reproducible_across_ranks,
        overlap_grad_reduce=overlaps_grads,
        overlap_param_gather=overlaps_params,
        lend_gradients=is_fused,
        layers_add_gradients=is_fused and adds_itself,
        finish_in_backward=finish_in_backward,
    )
    if not isinstance(ddp_config, FullyShardedDataParallelConfig):
        return settings
    return replace(
        settings,
        sync_module_states=ddp_config.sync_module_states,
        forward_methods=ddp_config.forward_methods,
        forward_prefetch=ddp_config.forward_prefetch,
        backward_prefetch=ddp_config.backward_prefetch,
        gather_skipped_units=ddp_config.gather_skipped_units,
        cpu_offload=ddp_config.cpu_offload,
        pins_memory=ddp_config.cpu_offload and streams.is_asynchronous(device.current_device()),
        nccl_ub=ddp_config.nccl_ub,
        collectives=getattr(ddp_config, "collectives", "auto"),  # of FSDP2 alone
    )


def _overlaps(
    ddp_config: DistributedDataParallelConfig, module: nn.Module, groups: DataParallelGroups
) -> tuple[bool, bool]:
    """Returns whether gradients are reduced during backward, and parameters gathered during forward."""
    if isinstance(ddp_config, FullyShardedDataParallelConfig):
        return True, ddp_config.forward_prefetch > 0 or ddp_config.backward_prefetch > 0
    # None: behind computation, where the model's device has streams. A model on meta will be on that of this process.
    on = next((p.device for p in module.parameters() if p.requires_grad and not p.is_meta), device.current_device())
    overlaps_grads, overlaps_params = ddp_config.overlap_grad_reduce, ddp_config.overlap_param_gather
    if overlaps_grads is None:
        overlaps_grads = streams.is_asynchronous(on)
    if overlaps_params is None:
        overlaps_params = ddp_config.shards_updates and streams.is_asynchronous(on)
    if ddp_config.sharding_strategy == "optim_grads" and groups.experts is not None:
        overlaps_grads = True  # a rank that waited inside of a backward would keep others from exchanging tokens
    return overlaps_grads, overlaps_params


def settings_to_compare(
    ddp_config: DistributedDataParallelConfig, config: Any, options: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields names and values, as text, of all settings that must be equal on all ranks.

    Args:
        options: arguments of the wrapper in addition to its settings.
    """
    values = {f.name: getattr(ddp_config, f.name) for f in fields(ddp_config) if f.name not in _MAY_DIFFER}
    for name, value in (values | dict(options)).items():
        yield f"the setting {name}", repr(value)
    for name in _FIELDS_OF_MODEL_CONFIG:
        yield f"the model's setting {name}", repr(bool(getattr(config, name, False)))


def changed_settings(ddp_config: DistributedDataParallelConfig) -> str:
    """Returns the settings that differ from their defaults, as text for reports."""
    values = ((f, getattr(ddp_config, f.name)) for f in fields(ddp_config))
    return ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)
