"""Refuses settings with which a sum over a global batch cannot have one shape on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ... import parallel_state
from ...dtypes import dtype_name
from ...errors import ParallelConfigError
from ...micro_batch_tree import odd_part
from ...model_parallel_config import ModelParallelConfig
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..groups import DataParallelGroups

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
