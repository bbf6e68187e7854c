"""Refuses settings that an engine does not have, and settings that exclude each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...base.dtypes import dtype_name
from ...base.errors import ParallelConfigError, warn_once
from ...base.micro_batch_tree import odd_part
from ...base.module_protocol import fusion_lends_memory
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..fully_sharded_data_parallel_config import (
    FullyShardedDataParallelConfig,
    Reshard,
    TorchFullyShardedDataParallelConfig,
)
from ..groups import DataParallelGroups
from .parts import PiecePlan

Config = TypeVar("Config", bound=DistributedDataParallelConfig)

_NOT_OF_FSDP2 = json.loads(Path(__file__).with_name("not_of_fsdp2.json").read_text("utf-8"))
"""Values of settings that FSDP2 accepts, in addition to empty ones, and what is wrong with the others."""

_BUFFER_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")


def check_replicated(
    ddp_config: DistributedDataParallelConfig, config: Any, module: nn.Module, caller: str, finish_in_backward: bool
) -> None:
    """Raises on settings that a wrapper with whole parameters on every rank cannot honour."""
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


def sharded_config(ddp_config: DistributedDataParallelConfig, caller: str) -> FullyShardedDataParallelConfig:
    """Returns the settings as those of ZeRO-3. Raises on those that ZeRO-3 cannot honour, and warns about buckets."""
    if not ddp_config.shards_parameters:
        raise ParallelConfigError(
            f"{caller} shards parameters, gradients and optimizer state, and data_parallel_sharding_strategy is "
            f"{ddp_config.sharding_strategy!r}; set 'optim_grads_params', or use wrap_model"
        )
    own = _config_as(FullyShardedDataParallelConfig, ddp_config)
    if own.bucket_size is not None:
        warn_once("bucket_size: where parameters are sharded a unit is the bucket. No number changes")
    return own


def fsdp2_config(ddp_config: DistributedDataParallelConfig) -> TorchFullyShardedDataParallelConfig:
    """Returns the settings as those of FSDP2. Raises or warns on those that FSDP2 does not have."""
    if ddp_config.sharding_strategy in ("optim", "optim_grads"):
        raise ParallelConfigError(
            f"TorchFullyShardedDataParallel shards parameters too, but the sharding strategy is "
            f"{ddp_config.sharding_strategy!r}; leave it at its default or set 'optim_grads_params'"
        )
    own = _config_as(TorchFullyShardedDataParallelConfig, ddp_config)
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
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    pieces: Iterable[PiecePlan] = (),
) -> None:
    """Raises where settings exclude each other, the model's config, or these ranks.

    Args:
        pieces: pieces of the sharded parameters.

    Raises:
        ParallelConfigError: says what to change.
    """
    problems = _reorderings(config, ddp_config, pieces), _unfit_ranks(config, ddp_config, groups)
    for problem in itertools.chain(*problems) if ddp_config.reproducible_across_ranks else ():
        raise ParallelConfigError(f"reproducible_across_ranks adds up gradients in one tree, and {problem}")


def _reorderings(config: Any, ddp_config: DistributedDataParallelConfig, pieces: Iterable[PiecePlan]) -> Iterator[str]:
    """Yields the settings that add gradients in another order, or round in between."""
    if getattr(ddp_config, "collectives", "auto") == "torch":
        yield "collectives='torch' leaves the order of additions to the backend; set collectives='auto'"
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
