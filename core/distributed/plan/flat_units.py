"""The plan of a model whose parameters are sharded in flat buffers, unit by unit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ... import device
from ...errors import ParallelConfigError
from ..distributed_data_parallel_config import DistributedDataParallelConfig, shards_parameters
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig, parse_overrides
from ..groups import DataParallelGroups
from .buffers import (
    accumulated_in_fp32,
    check_precision,
    check_reduction,
    is_expert_parameter,
    lay_out_params,
    plan_bucket,
    reject_unfit_parameter,
)
from .common import common_plan
from .layout import BucketLayout
from .names import ParameterNames
from .resharding import check_reshard, reshard_of
from .units import Unit, UnitChoice, find_units
from .values import BucketPlan, BufferPlan, FlatUnitPlan, FullyShardedPlan

_Kind = tuple[bool, bool, torch.dtype, torch.dtype, torch.device]
"""Of parameters that share a buffer: trained, experts, dtype, dtype of the gradient, device."""


def plan_flat_units(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice],
    *,
    caller: str,
) -> FullyShardedPlan:
    """What `FullyShardedDataParallel` is to do to a model; see `plan_model`."""
    settings = _own_settings(ddp_config, caller)
    check_reduction(config, settings)
    check_precision(config, module)
    names, num_shards = ParameterNames(module), groups.shard.size()
    units = [*find_units(module, unit_classes, splits_dtypes=False), Unit((module,), ("",))]
    buckets: dict[_Kind, list[BucketPlan]] = {}
    of_units: list[tuple[tuple[_Kind, int], ...]] = []
    taken: set[nn.Parameter] = set()
    for unit in units:
        params = dict.fromkeys(p for member in unit.modules for p in member.parameters() if p not in taken)
        taken.update(params)
        places = []
        for kind, of_kind in _by_kind(names, list(params), settings).items():
            in_buffer = buckets.setdefault(kind, [])
            start = in_buffer[-1].layout.end if in_buffer else 0
            (layout,) = lay_out_params(of_kind, dp_size=num_shards, separates_shared=False)
            moved = BucketLayout(start, start + layout.end, layout.members, layout.ranges)
            places.append((kind, len(in_buffer)))
            in_buffer.append(plan_bucket(names, of_kind, moved, num_shards))
        of_units.append(tuple(places))
    index_of = {kind: index for index, kind in enumerate(buckets)}
    buffers = tuple(_buffer(kind, of_kind, settings, num_shards) for kind, of_kind in buckets.items())
    keys = [tuple((index_of[kind], number) for kind, number in places) for places in of_units]
    reshards = [*(_reshards(unit, settings, num_shards) for unit in units[:-1]), False]
    sizes = [tuple((index, buffers[index].buckets[number].elements) for index, number in key) for key in keys]
    slots = _slots(sizes, reshards, 1 + max(settings.forward_prefetch, settings.backward_prefetch))
    planned = tuple(
        FlatUnitPlan(
            modules=unit.modules,
            names=unit.names,
            buckets=key,
            slot=slot if num_shards > 1 and key else None,
            is_freed=reshard,
            is_needed_in_backward=unit.is_needed_in_backward,
        )
        for unit, key, slot, reshard in zip(units, keys, slots, reshards, strict=True)
    )
    common = common_plan(config, settings, groups, caller=caller)
    common["reduces_every_micro_batch"] &= num_shards > 1
    return FullyShardedPlan(
        **common,
        buffers=buffers,
        leaves=_order_of_leaving(buffers, planned),
        reduces_during_backward=True,
        overlaps_grads=True,
        overlaps_params=settings.forward_prefetch > 0 or settings.backward_prefetch > 0,
        averages_in_collective=settings.average_in_collective,
        adds_in_fp32=settings.reduce_scatter_with_fp32_accumulation,
        units=planned,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=settings.backward_prefetch,
    )


def _own_settings(ddp_config: DistributedDataParallelConfig, caller: str) -> FullyShardedDataParallelConfig:
    """The settings as given, or the defaults of what a plain config does not say."""
    if isinstance(ddp_config, FullyShardedDataParallelConfig):
        return ddp_config
    if not shards_parameters(ddp_config.sharding_strategy):
        raise ParallelConfigError(
            f"{caller} shards parameters, gradients and optimizer state, and data_parallel_sharding_strategy is "
            f"{ddp_config.sharding_strategy!r}; set 'optim_grads_params', or use wrap_model"
        )
    own = ("data_parallel_sharding_strategy", "use_distributed_optimizer")
    shared = {f.name: getattr(ddp_config, f.name) for f in fields(DistributedDataParallelConfig) if f.name not in own}
    return FullyShardedDataParallelConfig(**shared)


def _reshards(unit: Unit, settings: FullyShardedDataParallelConfig, num_shards: int) -> bool:
    overrides = parse_overrides(settings.reshard_overrides)
    asked = check_reshard(reshard_of(unit.names[0], settings.reshard_after_forward, overrides), num_shards)
    if not isinstance(asked, bool):
        raise ParallelConfigError(
            f"reshard_after_forward is {asked} for unit {unit.names[0]}, and flat buffers keep parameters whole on "
            "all ranks or on none; give True or False, or use TorchFullyShardedDataParallel"
        )
    return asked


def _slots(sizes: Sequence[Hashable], reshards: Sequence[bool], in_use: int) -> list[int]:
    """The slot of each unit: of those that reshard, units of one size take turns with as many as are `in_use`."""
    shared: dict[Hashable, list[int]] = {}
    found: list[int] = []
    for size, is_shared in zip(sizes, reshards, strict=True):
        of_size = shared.setdefault(size, []) if is_shared else []
        # Not yet as many: a new one. Else the one that was taken longest ago.
        slot = of_size[-in_use] if len(of_size) >= in_use else max(found, default=-1) + 1
        of_size.append(slot)
        found.append(slot)
    return found


def _by_kind(
    names: ParameterNames, params: Sequence[nn.Parameter], settings: FullyShardedDataParallelConfig
) -> dict[_Kind, list[nn.Parameter]]:
    """Parameters of a unit, of one bucket each, in reverse order of construction."""
    kinds: dict[_Kind, list[nn.Parameter]] = {}
    for param in reversed(params):
        reject_unfit_parameter(names.of[param][0], param)
        wide = torch.promote_types(param.dtype, torch.float32)
        grad_dtype = wide if settings.grad_reduce_in_fp32 and param.requires_grad else param.dtype
        place = device.current_device() if param.is_meta else param.device  # where it will be materialized
        kind = param.requires_grad, is_expert_parameter(param), param.dtype, grad_dtype, place
        kinds.setdefault(kind, []).append(param)
    return kinds


def _buffer(
    kind: _Kind, buckets: Sequence[BucketPlan], settings: FullyShardedDataParallelConfig, num_shards: int
) -> BufferPlan:
    is_trained, holds_experts, dtype, grad_dtype, _ = kind
    found = (param.name for bucket in buckets for param in bucket.params)
    return BufferPlan(
        param_dtype=dtype,
        grad_dtype=grad_dtype,
        holds_params=True,
        releases_grads=is_trained and num_shards > 1,
        holds_experts=holds_experts,
        accumulated_in_fp32=accumulated_in_fp32(found, grad_dtype, settings) if is_trained else frozenset(),
        is_trained=is_trained,
        buckets=tuple(buckets),
    )


def _order_of_leaving(buffers: Sequence[BufferPlan], units: Sequence[FlatUnitPlan]) -> tuple[tuple[int, int], ...]:
    """That in which backward is expected to finish units; the root's last, which backward is in all the time."""
    place = {key: buffers[key[0]].buckets[key[1]].place for unit in units[:-1] for key in unit.buckets}
    inner = sorted(place, key=lambda key: -place[key])
    return tuple(key for key in (*inner, *units[-1].buckets) if buffers[key[0]].is_trained)
