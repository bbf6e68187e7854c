"""Reads the settings of a wrapper and of a model: what they mean for a plan, and which exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from ... import device, parallel_state
from ...comm import streams
from ...dtypes import LOW_PRECISION, as_dtype, dtype_name
from ...errors import ParallelConfigError, warn_once
from ...micro_batch_tree import odd_part
from ...model_parallel_config import ModelParallelConfig
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig, Reshard
from ..groups import DataParallelGroups
from ..torch_fully_sharded_data_parallel_config import engine_of
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


def reshard_of(name: str, default: Reshard, overrides: Sequence[tuple[str, Reshard]]) -> Reshard:
    """Returns the value for the module `name`: that of the last matching pattern, else `default`."""
    return next((value for pattern, value in reversed(overrides) if fnmatchcase(name, pattern)), default)


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
    asked = as_dtype(settings.param_dtype)
    param_dtype = asked or compute_dtype
    is_cast = asked is not None or (arrived == {torch.float32} and param_dtype != torch.float32)
    reduce_dtype = as_dtype(settings.reduce_dtype) or (torch.float32 if settings.grad_reduce_in_fp32 else None)
    if torch.float16 in (asked, reduce_dtype) and compute_dtype != torch.float16:
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
    """Returns the dtype that a model's config asks for; any object will do."""
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else torch.float32


_ASKED = "reproducible_across_ranks adds up gradients in one tree"


def check_reproducible(config: Any, settings: DistributedDataParallelConfig, groups: DataParallelGroups) -> None:
    """Raises where ``reproducible_across_ranks`` is set, and other settings or these ranks cannot have it.

    Raises:
        ParallelConfigError: says what to change.
    """
    if not settings.reproducible_across_ranks:
        return
    parts = getattr(config, "context_parallel_size", 1)
    found = _reordering(config, settings) or _rounding(settings) or _unfit_ranks(settings, groups, parts)
    if found is not None:
        raise ParallelConfigError(f"{_ASKED}, and {found}")


def check_one_rounding(
    settings: DistributedDataParallelConfig, dtypes: Iterable[tuple[torch.dtype, torch.dtype]]
) -> None:
    """Raises where shards are added up over micro-batches in another dtype than over ranks.

    Args:
        dtypes: of gradients as they are reduced, and of the shards that keep them.

    Raises:
        ParallelConfigError: says what to change.
    """
    if not (settings.reproducible_across_ranks and settings.reduce_every_micro_batch):
        return
    for reduced, kept in dtypes:
        if reduced != kept:
            raise ParallelConfigError(
                f"{_ASKED}, and reduce_every_micro_batch adds over ranks in {dtype_name(reduced)} and over "
                f"micro-batches in {dtype_name(kept)}; drop reduce_every_micro_batch, or reduce in {dtype_name(kept)}"
            )


def _reordering(config: Any, settings: DistributedDataParallelConfig) -> str | None:
    if settings.average_in_collective:
        return "average_in_collective leaves the order of additions to the backend; drop average_in_collective"
    if getattr(settings, "collectives", "auto") == "torch":
        return "collectives='torch' leaves the order of additions to the backend; set collectives='auto'"
    if getattr(config, "gradient_accumulation_fusion", False) and not isinstance(config, ModelParallelConfig):
        return (
            "gradient_accumulation_fusion in this config says that layers add into main_grad themselves; set "
            "gradient_accumulation_fusion=False"
        )
    return None


def _rounding(settings: DistributedDataParallelConfig) -> str | None:
    """Finds a setting that rounds between a rank's additions and those of ranks, whose number then changes bits."""
    for name in ("reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation"):
        if getattr(settings, name):
            return f"{name} rounds between additions on a rank and over ranks; set grad_reduce_in_fp32 in its place"
    return None


def _unfit_ranks(settings: DistributedDataParallelConfig, groups: DataParallelGroups, parts: int) -> str | None:
    if groups.experts is not None:
        return "experts cut over ranks add up tokens in another order; set expert_model_parallel_size=1"
    size = groups.whole.size()
    replicas = size // parts
    if size % parts or odd_part(replicas) != 1:
        return (
            f"{replicas} data-parallel ranks share no tree with other numbers of ranks; use a power of two that "
            "divides the number of micro-batches of a global batch: 1, 2, 4, 8, ..."
        )
    if parts == 1:
        return None
    if groups.replicate is not None and not settings.reduce_every_micro_batch:
        return (
            f"context_parallel_size {parts} puts parts of a sequence between the ranks of an optimizer instance and "
            "its replicas; set num_distributed_optimizer_instances=1, or reduce_every_micro_batch"
        )
    if parallel_state.model_parallel_is_initialized():
        ranks = dist.get_process_group_ranks(groups.whole)
        own = parallel_state.get_context_parallel_rank()
        if ranks.index(dist.get_rank()) % parts != own:
            return "context-parallel ranks are not neighbours in the group of replicas; leave order at its default"
    return None
