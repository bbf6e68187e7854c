"""The settings of a wrapper as resolved for one model on its ranks, which engines read, and those that are refused.

Only the modules of this folder read a wrapper's config: an engine finds the settings that it needs in `Plan.settings`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...base import device
from ...base.dtypes import dtype_name
from ...base.errors import ParallelConfigError, warn_once
from ...base.megatron_names import changed_fields, config_with
from ...base.micro_batch_tree import odd_part
from ...base.module_protocol import fusion_lends_memory
from ...comm import streams
from ...comm.message_formats import BLOCK, OWN_DTYPE
from ..distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from ..fully_sharded_data_parallel_config import (
    FullyShardedDataParallelConfig,
    Reshard,
    TorchFullyShardedDataParallelConfig,
)
from ..groups import SPLITS, DataParallelGroups
from .parts import PiecePlan

Config = TypeVar("Config", bound=DistributedDataParallelConfig)

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
    finish_in_backward: bool,
) -> Settings:
    """Resolves the settings of a wrapper for a model and the ranks that replicate it.

    Args:
        ddp_config: the engine's own type of settings (`config_of_engine`).
        config: the model's config, any object; absent fields take their defaults.
        finish_in_backward: the argument of `DistributedDataParallel`.

    Raises:
        ParallelConfigError: what whole parameters exclude, for this model.
    """
    if engine is EngineKind.FLAT_BUFFERS:
        _check_replicated(ddp_config, config, module, finish_in_backward)
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
    has_streams = streams.is_asynchronous(on)
    grads, params = ddp_config.overlap_grad_reduce, ddp_config.overlap_param_gather
    # A rank that waited inside of a backward would keep others from exchanging tokens.
    must_overlap = ddp_config.sharding_strategy == "optim_grads" and groups.experts is not None
    overlaps_params = ddp_config.shards_updates and has_streams if params is None else params
    return must_overlap or (has_streams if grads is None else grads), overlaps_params


def settings_to_compare(
    ddp_config: DistributedDataParallelConfig,
    config: Any,
    disable_bucketing: bool,
    finish_in_backward: bool,
    policy: Any,
) -> Iterator[tuple[str, str]]:
    """Yields names and values, as text, of all settings and arguments that must be equal on all ranks."""
    values = {f.name: getattr(ddp_config, f.name) for f in fields(ddp_config) if f.name not in _MAY_DIFFER}
    values |= {"disable_bucketing": disable_bucketing, "finish_in_backward": finish_in_backward}
    if policy is not None:  # the dtypes that it says are in place of the settings'
        values |= {f.name: getattr(policy, f.name) for f in fields(policy)}
    for name, value in values.items():
        yield f"the setting {name}", repr(value)
    for name in _FIELDS_OF_MODEL_CONFIG:
        yield f"the model's setting {name}", repr(bool(getattr(config, name, False)))


def read_settings(config: Any) -> str:
    """Returns what a plan reads of a model's config, as text for reports: the fields that the config has."""
    names = (*_FIELDS_OF_MODEL_CONFIG, *SPLITS)
    return ", ".join(f"{name}={getattr(config, name)}" for name in names if hasattr(config, name))


def changed_settings(ddp_config: DistributedDataParallelConfig) -> str:
    """Returns the settings that differ from their defaults, as text for reports."""
    values = ((f, getattr(ddp_config, f.name)) for f in fields(ddp_config))
    return ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)


# ---- what an engine does not have, and what excludes each other

_NOT_OF_FSDP2 = json.loads(Path(__file__).with_name("not_of_fsdp2.json").read_text("utf-8"))
"""Values of settings that FSDP2 accepts, in addition to empty ones, and what is wrong with the others."""

_BUFFER_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")


def own_settings(given: Any, engine: EngineKind | None = None) -> DistributedDataParallelConfig:
    """Returns a config of this library as it is, and what one of Megatron-LM's changes of its defaults as ours.

    As in Megatron-LM, its sharding strategy counts with ``use_megatron_fsdp`` alone: its arguments set
    ``optim_grads_params`` in every run.

    Args:
        engine: the wrapper's. None: FSDP2 if the config has FSDP2's field ``reshard_after_forward``.

    Raises:
        ParallelConfigError: it is no config of a wrapper, or changes what this library does not have.
    """
    if isinstance(given, DistributedDataParallelConfig):
        return given
    names = {field.name for field in fields(given)} if is_dataclass(given) and not isinstance(given, type) else set()
    is_fsdp2 = engine is EngineKind.FSDP2 or (engine is None and "reshard_after_forward" in names)
    kind = TorchFullyShardedDataParallelConfig if is_fsdp2 else DistributedDataParallelConfig
    if not {"overlap_grad_reduce", "reshard_after_forward"} & names:
        raise ParallelConfigError(
            f"ddp_config is a {type(given).__name__}, which is no config of a wrapper; give a {kind.__name__}, of "
            "this library or of Megatron-LM"
        )
    changed = changed_fields(given)
    if not changed.pop("use_megatron_fsdp", False) | changed.pop("use_custom_fsdp", False):  # the second: its old name
        changed.pop("data_parallel_sharding_strategy", None)
    if engine is EngineKind.FULLY_SHARDED:
        changed.setdefault("data_parallel_sharding_strategy", "optim_grads_params")
    return config_with(kind, changed, type(given).__name__)


def config_of_engine(
    ddp_config: DistributedDataParallelConfig, engine: EngineKind, caller: str
) -> DistributedDataParallelConfig:
    """Returns the settings by the engine's own type. Raises on those that it cannot honour, warns of idle ones.

    Raises:
        ParallelConfigError: says what to change.
    """
    strategy = ddp_config.sharding_strategy
    if engine is EngineKind.FLAT_BUFFERS:
        if ddp_config.shards_parameters:
            raise ParallelConfigError(
                f"{caller} keeps whole parameters, but the sharding strategy is {strategy!r}; use wrap_model, or "
                "TorchFullyShardedDataParallel"
            )
        return ddp_config
    if engine is EngineKind.FULLY_SHARDED:
        if not ddp_config.shards_parameters:
            raise ParallelConfigError(
                f"{caller} shards parameters, gradients and optimizer state, and data_parallel_sharding_strategy is "
                f"{strategy!r}; set 'optim_grads_params', or use wrap_model"
            )
        if ddp_config.bucket_size is not None:
            warn_once("bucket_size: where parameters are sharded a unit is the bucket. No number changes")
        return _config_as(FullyShardedDataParallelConfig, ddp_config)
    if strategy in ("optim", "optim_grads"):
        raise ParallelConfigError(
            f"TorchFullyShardedDataParallel shards parameters too, but the sharding strategy is {strategy!r}; leave "
            "it at its default or set 'optim_grads_params'"
        )
    own = _config_as(TorchFullyShardedDataParallelConfig, ddp_config)
    if own.collectives == "torch" and (own.grad_comm_dtype or own.param_comm_dtype):
        raise ParallelConfigError(
            f"collectives is 'torch', which leaves messages to FSDP2, and param_comm_dtype is {own.param_comm_dtype}, "
            f"grad_comm_dtype {own.grad_comm_dtype}; drop collectives, or these"
        )
    for name, row in _NOT_OF_FSDP2.items():
        value = getattr(own, name)
        if value and value not in row["accepted"]:
            raise ParallelConfigError(f"{name} is {value!r}, {row['why']}")
    if without_effect := [name for name in _BUFFER_FIELDS if getattr(own, name)]:
        warn_once(
            f"{', '.join(without_effect)}: only wrappers with gradient buffers have these settings; FSDP2 reduces "
            "unit by unit and overlaps by itself. No number changes"
        )
    return own


def _check_replicated(
    ddp_config: DistributedDataParallelConfig, config: Any, module: nn.Module, finish_in_backward: bool
) -> None:
    """Raises on settings that a wrapper with whole parameters cannot honour for this model."""
    precision = next((name for name in ("bf16", "fp16") if getattr(config, name, False)), None)
    if precision and all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        raise ParallelConfigError(
            f"config.{precision} is set, but every parameter is fp32, and flat buffers compute in the dtype of their "
            "parameters; wrap the model in Float16Module(config, model) first"
        )
    if finish_in_backward and ddp_config.shards_updates:
        raise ParallelConfigError(
            "finish_in_backward leaves whole gradients in param.grad, and the sharding strategy "
            f"{ddp_config.sharding_strategy!r} leaves a rank its shard; drop one of the two"
        )
    if finish_in_backward and ddp_config.reproducible_across_ranks:
        raise ParallelConfigError(
            "finish_in_backward reduces gradients after each backward, and reproducible_across_ranks when all "
            "micro-batches of a step are added; drop one of the two"
        )


def _config_as(kind: type[Config], ddp_config: DistributedDataParallelConfig) -> Config:
    """Converts settings to `kind`: unchanged if they are of that kind, else with its defaults for missing fields."""
    if isinstance(ddp_config, kind):
        return ddp_config
    names = {f.name for f in fields(DistributedDataParallelConfig)}
    names -= {"data_parallel_sharding_strategy", "use_distributed_optimizer"}
    return kind(**{name: getattr(ddp_config, name) for name in names})


def check_reshard(value: Reshard, shard_size: int) -> Reshard:
    """Returns `value` normalised for FSDP2 on `shard_size` ranks: 1 is False and `shard_size` is True.

    Raises:
        ParallelConfigError: a number does not divide `shard_size`; the message lists those that do.
    """
    if isinstance(value, bool):
        return value
    divisors = [number for number in range(1, shard_size + 1) if shard_size % number == 0]
    if value not in divisors:
        raise ParallelConfigError(
            f"reshard_after_forward is {value}, which does not divide the {shard_size} ranks that share a parameter; "
            f"it takes True, False, or one of {', '.join(map(str, divisors))}"
        )
    return value == shard_size if value in (1, shard_size) else value


def check_contradictions(
    config: Any, ddp_config: DistributedDataParallelConfig, groups: DataParallelGroups, pieces: Iterable[PiecePlan]
) -> None:
    """Raises where ``reproducible_across_ranks``, or a format of messages, excludes another setting, the model, or
    these ranks.

    Args:
        pieces: all pieces of the model.

    Raises:
        ParallelConfigError: says what to change.
    """
    pieces = list(pieces)
    if ddp_config.sends_blocks and not any(
        {piece.param_format, piece.grad_format} - {None, OWN_DTYPE} for piece in pieces
    ):
        raise ParallelConfigError(
            f"param_comm_dtype and grad_comm_dtype='int8' send matrices whose rows are whole blocks of {BLOCK} "
            "elements, and this model has none; drop them"
        )
    if alone := next((p for p in pieces if p.param_format and p.num_param_shards == 1 and p.bucket is None), None):
        raise ParallelConfigError(
            f"param_comm_dtype is {alone.param_format}, and one rank has all of {alone.params[0].name}, which FSDP2 "
            "then does not gather: forward would compute with other numbers than on several; drop it, or use "
            "FullyShardedDataParallel"
        )
    if ddp_config.reproducible_across_ranks:
        for problem in (*_reorderings(config, ddp_config, pieces), *_unfit_ranks(config, ddp_config, groups)):
            raise ParallelConfigError(f"reproducible_across_ranks adds up gradients in one tree, and {problem}")


def _reorderings(config: Any, ddp_config: DistributedDataParallelConfig, pieces: Iterable[PiecePlan]) -> Iterator[str]:
    """Yields the settings that add gradients in another order, or round in between."""
    if getattr(ddp_config, "collectives", "auto") == "torch":
        yield "collectives='torch' leaves the order of additions to the backend; set collectives='auto'"
    if ddp_config.grad_comm_dtype is not None:
        yield "grad_comm_dtype rounds the sum of each rank; drop it"
    if getattr(config, "gradient_accumulation_fusion", False) and not fusion_lends_memory(config):
        yield (
            "gradient_accumulation_fusion in this config says that layers add into main_grad themselves; set "
            "gradient_accumulation_fusion=False"
        )
    if ddp_config.param_name_patterns_for_fp32_local_accumulation:
        yield (
            "param_name_patterns_for_fp32_local_accumulation rounds between additions on a rank and over ranks; set "
            "grad_reduce_in_fp32 in its place"
        )
    for piece in pieces if ddp_config.reduce_every_micro_batch else ():
        shard_dtype = dtype_name(piece.shard_grad_dtype)
        if piece.is_trained and piece.grad_dtype != piece.shard_grad_dtype:
            yield (
                f"reduce_every_micro_batch adds over ranks in {dtype_name(piece.grad_dtype)} and over micro-batches "
                f"in {shard_dtype}; drop reduce_every_micro_batch, or reduce in {shard_dtype}"
            )


def _unfit_ranks(config: Any, ddp_config: DistributedDataParallelConfig, groups: DataParallelGroups) -> Iterator[str]:
    size, parts = groups.whole.size(), getattr(config, "context_parallel_size", 1)
    if groups.replicated is not None:
        yield "replicated parameters are reduced by themselves; drop replicated"
    if groups.experts is not None:
        yield "experts cut over ranks add up tokens in another order; set expert_model_parallel_size=1"
    if size % parts or odd_part(size // parts) != 1:
        yield (
            f"{size // parts} data-parallel ranks share no tree with other numbers of ranks; use a power of two that "
            "divides the number of micro-batches of a global batch: 1, 2, 4, 8, ..."
        )
    if parts > 1 and groups.replicate is not None and not ddp_config.reduce_every_micro_batch:
        yield (
            f"context_parallel_size {parts} puts parts of a sequence between the ranks of an optimizer instance and "
            "its replicas; set num_distributed_optimizer_instances=1, or reduce_every_micro_batch"
        )
    if parts > 1 and groups.model.cp is not None:
        index = dist.get_process_group_ranks(groups.whole).index(dist.get_rank())
        if index % parts != groups.model.cp.rank():
            yield "context-parallel ranks are not neighbours in the group of replicas; leave order at its default"
