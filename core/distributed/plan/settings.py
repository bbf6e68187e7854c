"""Reads the settings of a wrapper and of a model: what they mean for a plan, and which exclude each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...base import device
from ...base.dtypes import LOW_PRECISION, as_dtype, dtype_name
from ...base.errors import ParallelConfigError, warn_once
from ...base.micro_batch_tree import odd_part
from ...comm import streams
from ...model_parallel_config import ModelParallelConfig
from ..distributed_data_parallel_config import DistributedDataParallelConfig, Engine
from ..fully_sharded_data_parallel_config import (
    FullyShardedDataParallelConfig,
    Reshard,
    TorchFullyShardedDataParallelConfig,
)
from ..groups import DataParallelGroups
from .parts import PiecePlan
from .values import GradientReduction, Plan

_MAY_DIFFER = frozenset({"check_for_nan_in_grad", "check_for_large_grads", "pin_memory"})
"""Settings that concern a rank alone."""

_FIELDS_OF_MODEL_CONFIG = ("bf16", "fp16", "calculate_per_token_loss", "gradient_accumulation_fusion")


Settings = TypeVar("Settings", bound=DistributedDataParallelConfig)

_NOT_OF_FSDP2 = json.loads(Path(__file__).with_name("not_of_fsdp2.json").read_text("utf-8"))
"""Values of settings that FSDP2 accepts, in addition to empty ones, and what is wrong with the others."""

_BUFFER_FIELDS = (
    *("overlap_grad_reduce", "overlap_param_gather", "bucket_size", "num_buckets"),
    *("pad_buckets_for_high_nccl_busbw", "average_in_collective"),
)


def whole_settings(
    ddp_config: DistributedDataParallelConfig, config: Any, module: nn.Module, caller: str, finish_in_backward: bool
) -> DistributedDataParallelConfig:
    """Returns the settings of a wrapper that keeps whole parameters. Raises on what it cannot honour."""
    strategy = ddp_config.sharding_strategy
    if ddp_config.shards_parameters:
        raise ParallelConfigError(
            f"{caller} keeps whole parameters, but the sharding strategy is {strategy!r}; use wrap_model, or "
            "TorchFullyShardedDataParallel"
        )
    precision = next((name for name in ("bf16", "fp16") if getattr(config, name, False)), None)
    if precision and all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        raise ParallelConfigError(
            f"config.{precision} is set, but every parameter is fp32, and flat buffers compute in the dtype of their "
            "parameters; wrap the model in Float16Module(config, model) first"
        )
    if finish_in_backward and strategy != "no_shard":
        raise ParallelConfigError(
            "finish_in_backward leaves whole gradients in param.grad, and the sharding strategy "
            f"{strategy!r} leaves a rank its shard; drop one of the two"
        )
    if finish_in_backward and ddp_config.reproducible_across_ranks:
        raise ParallelConfigError(
            "finish_in_backward reduces gradients after each backward, and reproducible_across_ranks when all "
            "micro-batches of a step are added; drop one of the two"
        )
    return ddp_config


def sharded_settings(
    ddp_config: DistributedDataParallelConfig, groups: DataParallelGroups, caller: str
) -> FullyShardedDataParallelConfig:
    """Returns the settings of units on flat buffers. Raises on what they cannot honour, and warns about buckets."""
    if not ddp_config.shards_parameters:
        raise ParallelConfigError(
            f"{caller} shards parameters, gradients and optimizer state, and data_parallel_sharding_strategy is "
            f"{ddp_config.sharding_strategy!r}; set 'optim_grads_params', or use wrap_model"
        )
    settings = _settings_as(FullyShardedDataParallelConfig, ddp_config)
    if settings.outer_dp_sharding_strategy != "no_shard" and groups.replicate is None:
        raise ParallelConfigError(
            f"outer_dp_sharding_strategy is {settings.outer_dp_sharding_strategy!r} with one optimizer instance; drop "
            "it, or set num_distributed_optimizer_instances"
        )
    if without_effect := [name for name in ("bucket_size", "num_buckets") if getattr(settings, name) is not None]:
        warn_once(f"{', '.join(without_effect)}: where parameters are sharded a unit is the bucket. No number changes")
    return settings


def fsdp2_settings(ddp_config: DistributedDataParallelConfig) -> TorchFullyShardedDataParallelConfig:
    """Returns the settings of FSDP2. Raises or warns on what FSDP2 does not have."""
    if ddp_config.sharding_strategy in ("optim", "optim_grads"):
        raise ParallelConfigError(
            f"TorchFullyShardedDataParallel shards parameters too, but the sharding strategy is "
            f"{ddp_config.sharding_strategy!r}; leave it at its default or set 'optim_grads_params'"
        )
    settings = _settings_as(TorchFullyShardedDataParallelConfig, ddp_config)
    for name, row in _NOT_OF_FSDP2.items():
        value = getattr(settings, name)
        if value and value not in row["accepted"]:
            raise ParallelConfigError(f"{name} is {value!r}, {row['why']}")
    if without_effect := [name for name in _BUFFER_FIELDS if getattr(settings, name)]:
        warn_once(
            f"{', '.join(without_effect)}: only wrappers with gradient buffers have these settings; FSDP2 reduces "
            "unit by unit and overlaps by itself. No number changes"
        )
    return settings


def _settings_as(kind: type[Settings], ddp_config: DistributedDataParallelConfig) -> Settings:
    """Converts settings to `kind`: unchanged if they are of that kind, else with its defaults for missing fields."""
    if isinstance(ddp_config, kind):
        return ddp_config
    names = {f.name for f in fields(DistributedDataParallelConfig)}
    names -= {"data_parallel_sharding_strategy", "use_distributed_optimizer"}
    return kind(**{name: getattr(ddp_config, name) for name in names})


def common_plan(
    module: nn.Module, config: Any, settings: DistributedDataParallelConfig, caller: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a plan that follow from settings alone, with None resolved for this model.

    Args:
        config: the model's config, any object; absent fields take their defaults.
        options: arguments of the caller in addition to the settings, which have to be equal on all ranks.
    """
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    changed_values = {f.name: values[f.name] for f in fields(settings) if values[f.name] != f.default}
    compared = {name: value for name, value in values.items() if name not in _MAY_DIFFER} | dict(options)
    # A training forward of such a module, as of BatchNorm, changes its buffers by its own batch.
    has_statistics = any(getattr(submodule, "running_mean", None) is not None for submodule in module.modules())
    of_model = {name: bool(getattr(config, name, False)) for name in _FIELDS_OF_MODEL_CONFIG}
    # The layers of this library compute gradients in lent memory, unless ``gradient_accumulation_fusion`` is False. In
    # a config of another library True says that layers add to ``main_grad`` themselves.
    is_fused = bool(getattr(config, "gradient_accumulation_fusion", True))
    is_of_another = hasattr(config, "gradient_accumulation_fusion") and not isinstance(config, ModelParallelConfig)
    return {
        # Fields of a plan with the name of a setting have its value.
        **{f.name: values[f.name] for f in fields(Plan) if f.name in values},
        "broadcast_buffers": has_statistics if settings.broadcast_buffers is None else settings.broadcast_buffers,
        "buffer_dtype": as_dtype(values.get("buffer_dtype")),
        "pins_memory": _pins_memory(values),
        "caller": caller,
        "strategy": settings.sharding_strategy,
        "reduction": GradientReduction.SUM if of_model["calculate_per_token_loss"] else GradientReduction.MEAN,
        "is_reproducible": settings.reproducible_across_ranks,
        "lends_gradients": is_fused,
        "layers_add_gradients": is_fused and is_of_another,
        "settings": (
            ("the wrapper", caller),
            *((f"the setting {name}", repr(value)) for name, value in compared.items()),
            *((f"the model's setting {name}", repr(value)) for name, value in of_model.items()),
        ),
        "changed_settings": ", ".join(f"{name}={value}" for name, value in changed_values.items()),
        "tensor_parallel_size": getattr(config, "tensor_model_parallel_size", 1),
        "context_parallel_size": getattr(config, "context_parallel_size", 1),
    }


def _pins_memory(settings: Mapping[str, Any]) -> bool:
    """Returns whether to pin offloaded shards. Warns if it was asked for without an accelerator."""
    if not (settings.get("cpu_offload") and settings["pin_memory"]):
        return False
    has_accelerator = streams.is_asynchronous(device.current_device())
    if not has_accelerator:
        warn_once(
            "pin_memory is set, but there is no accelerator that memory could be pinned for; shards are in ordinary "
            "memory. No number changes"
        )
    return has_accelerator


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


def mixed_precision_policy(
    parameters: Iterable[torch.Tensor], compute_dtype: torch.dtype, settings: FullyShardedDataParallelConfig
) -> MixedPrecisionPolicy:
    """Returns the dtypes in which a model computes, reduces and answers.

    Parameters that all arrived in fp32 are cast for the all-gather, and inputs and outputs too, as `Float16Module`
    does for others: the fp32 shard is the master copy. Where some arrived in lower precision, every parameter keeps
    the dtype in which it came, fp32 norms and routers among them.

    Args:
        compute_dtype: what the model's config says; ``param_dtype`` overrides it, for every parameter.

    Raises:
        ParallelConfigError: fp16 in a model whose config does not know of it.
    """
    arrived = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    override = as_dtype(settings.param_dtype)
    param_dtype = override or compute_dtype
    is_cast = override is not None or (arrived == {torch.float32} and param_dtype != torch.float32)
    reduce_dtype = as_dtype(settings.reduce_dtype) or (torch.float32 if settings.grad_reduce_in_fp32 else None)
    if torch.float16 in (override, reduce_dtype) and compute_dtype != torch.float16:
        raise ParallelConfigError(
            f"param_dtype is {settings.param_dtype} and reduce_dtype {settings.reduce_dtype}, but the model's config "
            "has fp16=False, so that no loss scale would keep small gradients from vanishing; set fp16=True there"
        )
    output_dtype = as_dtype(settings.output_dtype)
    if not is_cast:
        return MixedPrecisionPolicy(None, reduce_dtype, output_dtype, cast_forward_inputs=False)
    if output_dtype is None and param_dtype in LOW_PRECISION:
        output_dtype = torch.float32
    return MixedPrecisionPolicy(param_dtype, reduce_dtype or param_dtype, output_dtype, settings.cast_forward_inputs)


def compute_dtype(config: Any) -> torch.dtype:
    """Returns the dtype that a model's config, which may be any object, asks for."""
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else torch.float32


def check_contradictions(
    config: Any, settings: DistributedDataParallelConfig, groups: DataParallelGroups, pieces: Iterable[PiecePlan] = ()
) -> None:
    """Raises where settings exclude each other, the model's config, or these ranks.

    Args:
        pieces: pieces of the sharded parameters.

    Raises:
        ParallelConfigError: says what to change.
    """
    averages = settings.average_in_collective and settings.engine is not Engine.FSDP2  # which ignores it
    if averages and getattr(config, "calculate_per_token_loss", False):
        raise ParallelConfigError(
            "calculate_per_token_loss sums gradients over ranks and average_in_collective averages them; drop one"
        )
    problems = _reorderings(config, settings, pieces), _unfit_ranks(config, settings, groups)
    for problem in itertools.chain(*problems) if settings.reproducible_across_ranks else ():
        raise ParallelConfigError(f"reproducible_across_ranks adds up gradients in one tree, and {problem}")


def _reorderings(config: Any, settings: DistributedDataParallelConfig, pieces: Iterable[PiecePlan]) -> Iterator[str]:
    """Yields the settings that add gradients in another order, or round in between."""
    if settings.average_in_collective:
        yield "average_in_collective leaves the order of additions to the backend; drop average_in_collective"
    if getattr(settings, "collectives", "auto") == "torch":
        yield "collectives='torch' leaves the order of additions to the backend; set collectives='auto'"
    if getattr(config, "gradient_accumulation_fusion", False) and not isinstance(config, ModelParallelConfig):
        yield (
            "gradient_accumulation_fusion in this config says that layers add into main_grad themselves; set "
            "gradient_accumulation_fusion=False"
        )
    for name in ("reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation"):
        if getattr(settings, name):
            yield f"{name} rounds between additions on a rank and over ranks; set grad_reduce_in_fp32 in its place"
    for piece in pieces if settings.reduce_every_micro_batch else ():
        shard_dtype = dtype_name(piece.shard_grad_dtype)
        if piece.is_trained and piece.grad_dtype != piece.shard_grad_dtype:
            yield (
                f"reduce_every_micro_batch adds over ranks in {dtype_name(piece.grad_dtype)} and over micro-batches "
                f"in {shard_dtype}; drop reduce_every_micro_batch, or reduce in {shard_dtype}"
            )


def _unfit_ranks(config: Any, settings: DistributedDataParallelConfig, groups: DataParallelGroups) -> Iterator[str]:
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
    if parts > 1 and groups.replicate is not None and not settings.reduce_every_micro_batch:
        yield (
            f"context_parallel_size {parts} puts parts of a sequence between the ranks of an optimizer instance and "
            "its replicas; set num_distributed_optimizer_instances=1, or reduce_every_micro_batch"
        )
    if parts > 1 and groups.model.cp is not None:
        index = dist.get_process_group_ranks(groups.whole).index(dist.get_rank())
        if index % parts != groups.model.cp.rank():
            yield "context-parallel ranks are not neighbours in the group of replicas; leave order at its default"
