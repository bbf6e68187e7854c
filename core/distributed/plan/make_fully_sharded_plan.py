"""Plans a model whose parameters are sharded in flat buffers, unit by unit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import ParallelConfigError, WrapError, warn_once
from ...pending_parameters import can_be_pending
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..fully_sharded_data_parallel_config import (
    FullyShardedDataParallelConfig,
    Reshard,
    ShardCut,
    parse_cut,
    parse_cut_overrides,
    parse_overrides,
)
from ..groups import DataParallelGroups
from .common import common_plan, gathering_plan, settings_as
from .cuts import lay_out_unit
from .flat_plan import BucketPlan, BufferPlan
from .fully_sharded_plan import FlatUnitPlan, FullyShardedPlan
from .layout import BucketLayout
from .make_flat_plan import (
    Kind,
    accumulated_in_fp32,
    check_reduction,
    gradients_of_layers,
    kind_of,
    order_of_reduction,
    plan_bucket,
    reject_unfit_parameter,
)
from .names import ParameterNames
from .precision import compute_dtype, mixed_precision_policy
from .reproducible import check_one_rounding
from .resharding import check_reshard, reshard_of
from .transforms import plan_transforms
from .units import UnitChoice, UnitModules, find_units, own_parameters

_Kind = tuple[bool, torch.dtype, Kind]
"""Of parameters that share a buffer: whether they are trained, the dtype of computation, and their `kind_of`."""

_Places = tuple[tuple[int, int], ...]
"""Buffer and bucket of each part of a unit."""


def plan_fully_sharded(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice],
    *,
    caller: str,
) -> FullyShardedPlan:
    """Plans a model for `FullyShardedDataParallel`; see `plan_model`."""
    settings = _own_settings(ddp_config, caller)
    check_reduction(config, settings)
    precision = mixed_precision_policy(module.parameters(), compute_dtype(config), settings)
    names, num_shards = ParameterNames(module), groups.shard.size()
    is_shared_update = _shares_update(settings, groups)
    num_parts = num_shards * (groups.num_replicas if is_shared_update else 1)
    units = [*find_units(module, unit_classes, splits_dtypes=False), UnitModules((module,), ("",))]
    by_kind, places = _lay_out(units, names, settings, precision, num_parts)
    buffers = tuple(_buffer(kind, buckets, settings, num_parts) for kind, buckets in by_kind.items())
    # Where one rank has all, in one dtype and place, parameters are views of the shards themselves.
    is_whole = num_shards == 1 and precision.param_dtype is None and not settings.cpu_offload
    planned = _plan_units(units, places, buffers, settings, num_shards, has_slots=not is_whole)
    common = common_plan(config, settings, groups, caller=caller)
    common["reduces_every_micro_batch"] &= num_parts > 1
    check_one_rounding(
        settings, ((buffer.grad_dtype, buffer.shard_grad_dtype) for buffer in buffers if buffer.is_trained)
    )
    return FullyShardedPlan(
        **common,
        **gathering_plan(settings),
        **gradients_of_layers(config),
        transforms=plan_transforms(units[:-1], settings),
        buffers=buffers,
        reduction_order=order_of_reduction(buffers),
        reduces_during_backward=True,
        overlaps_grads=True,
        overlaps_params=settings.forward_prefetch > 0 or settings.backward_prefetch > 0,
        averages_in_collective=settings.average_in_collective,
        adds_in_fp32=settings.reduce_scatter_with_fp32_accumulation,
        units=planned,
        shards_update_over_replicas=is_shared_update,
        precision=precision,
    )


def _lay_out(
    units: Sequence[UnitModules],
    names: ParameterNames,
    settings: FullyShardedDataParallelConfig,
    precision: MixedPrecisionPolicy,
    num_parts: int,
) -> tuple[dict[_Kind, list[BucketPlan]], list[_Places]]:
    """Returns the buckets of each buffer, and which of them each unit has."""
    buckets: dict[_Kind, list[BucketPlan]] = {}
    in_buffer: dict[_Kind, list[nn.Parameter]] = {}
    of_units: list[list[tuple[_Kind, int]]] = []
    for unit, params in zip(units, own_parameters(units), strict=True):
        asked = _cut_of(unit, settings)
        of_units.append([])
        for kind, of_kind in _by_kind(names, params, settings, precision).items():
            before, members = buckets.setdefault(kind, []), in_buffer.setdefault(kind, [])
            layout, cut = lay_out_unit(
                [param.shape for param in of_kind],
                num_parts,
                asked,
                for_high_busbw=settings.pad_buckets_for_high_nccl_busbw,
            )
            moved = _moved(layout, before[-1].layout.end if before else 0, len(members))
            members += [of_kind[index] for index in layout.members]
            of_units[-1].append((kind, len(before)))
            before.append(plan_bucket(names, members, moved, num_parts, cut))
    index_of = {kind: index for index, kind in enumerate(buckets)}
    return buckets, [tuple((index_of[kind], number) for kind, number in own) for own in of_units]


def _plan_units(
    units: Sequence[UnitModules],
    places: Sequence[_Places],
    buffers: Sequence[BufferPlan],
    settings: FullyShardedDataParallelConfig,
    num_shards: int,
    *,
    has_slots: bool,
) -> tuple[FlatUnitPlan, ...]:
    """Decides of each unit whether it is freed after its forward, and which memory it is gathered into."""
    reshards = [*(_reshards(unit, settings, num_shards) for unit in units[:-1]), False]
    sizes = [tuple((index, buffers[index].buckets[number].elements) for index, number in own) for own in places]
    slots = _slots(
        sizes,
        [reshard is not False for reshard in reshards],
        1 + max(settings.forward_prefetch, settings.backward_prefetch),
    )
    return tuple(
        FlatUnitPlan(
            modules=unit.modules,
            names=unit.names,
            buckets=own,
            slot=slot if has_slots and own else None,
            is_freed=reshard is not False,
            kept_among=reshard if not isinstance(reshard, bool) and unit.is_needed_in_backward else None,
            is_needed_in_backward=unit.is_needed_in_backward,
        )
        for unit, own, slot, reshard in zip(units, places, slots, reshards, strict=True)
    )


def _own_settings(ddp_config: DistributedDataParallelConfig, caller: str) -> FullyShardedDataParallelConfig:
    """Returns the wrapper's own settings, or their defaults. Warns about those of buckets, which units replace."""
    if not ddp_config.shards_parameters:
        raise ParallelConfigError(
            f"{caller} shards parameters, gradients and optimizer state, and data_parallel_sharding_strategy is "
            f"{ddp_config.sharding_strategy!r}; set 'optim_grads_params', or use wrap_model"
        )
    without_effect = [field for field in ("bucket_size", "num_buckets") if getattr(ddp_config, field) is not None]
    if without_effect:
        warn_once(f"{', '.join(without_effect)}: where parameters are sharded a unit is the bucket. No number changes")
    return settings_as(FullyShardedDataParallelConfig, ddp_config)


def _reshards(unit: UnitModules, settings: FullyShardedDataParallelConfig, num_shards: int) -> Reshard:
    if settings.keep_gathered_between_micro_batches == "all":
        return False
    overrides = parse_overrides(settings.reshard_overrides)
    return check_reshard(reshard_of(unit.names[0], settings.reshard_after_forward, overrides), num_shards)


def _shares_update(settings: FullyShardedDataParallelConfig, groups: DataParallelGroups) -> bool:
    if settings.outer_dp_sharding_strategy == "no_shard":
        return False
    if groups.replicate is None:
        raise ParallelConfigError(
            f"outer_dp_sharding_strategy is {settings.outer_dp_sharding_strategy!r} with one optimizer instance; drop "
            "it, or set num_distributed_optimizer_instances"
        )
    return True


def _cut_of(unit: UnitModules, settings: FullyShardedDataParallelConfig) -> ShardCut:
    overrides = parse_cut_overrides(settings.shard_cut_overrides)
    matching = (cut for pattern, cut in reversed(overrides) if fnmatchcase(unit.names[0], pattern))
    return next(matching, parse_cut(settings.shard_cut, "shard_cut"))


def _moved(layout: BucketLayout, start: int, first_member: int) -> BucketLayout:
    """Returns the layout of one bucket at its place in a buffer, behind `first_member` parameters in order."""
    members = tuple(first_member + index for index in range(len(layout.members)))
    return replace(layout, start=start, end=start + layout.end, members=members)


def _slots(sizes: Sequence[Hashable], reshards: Sequence[bool], in_use: int) -> list[int]:
    """Returns each unit's slot. Units of one size that reshard share `in_use` slots in turn."""
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
    names: ParameterNames,
    params: Sequence[nn.Parameter],
    settings: FullyShardedDataParallelConfig,
    precision: MixedPrecisionPolicy,
) -> dict[_Kind, list[nn.Parameter]]:
    """Groups the parameters of a unit, in reverse order of construction, by the buffers that hold them."""
    kinds: dict[_Kind, list[nn.Parameter]] = {}
    for param in reversed(params):
        reject_unfit_parameter(names.of[param][0], param)
        if not can_be_pending(param):
            raise WrapError(
                f"parameter {names.of[param][0]} is a {type(param).__name__}, and FullyShardedDataParallel makes "
                "readers of a parameter wait by its class, nn.Parameter; make it an nn.Parameter, or use "
                "TorchFullyShardedDataParallel"
            )
        computes_in = (precision.param_dtype if param.is_floating_point() else None) or param.dtype
        kind = param.requires_grad, computes_in, kind_of(param, settings, computes_in, settings.reduce_dtype)
        kinds.setdefault(kind, []).append(param)
    return kinds


def _buffer(
    kind: _Kind, buckets: Sequence[BucketPlan], settings: FullyShardedDataParallelConfig, num_parts: int
) -> BufferPlan:
    is_trained, gathered_dtype, (holds_experts, dtype, grad_dtype, _) = kind
    found = (param.name for bucket in buckets for param in bucket.params)
    shard_grad_dtype = torch.promote_types(grad_dtype, dtype)
    return BufferPlan(
        param_dtype=dtype,
        gathered_dtype=gathered_dtype,
        grad_dtype=grad_dtype,
        shard_grad_dtype=shard_grad_dtype,
        holds_params=True,
        releases_grads=is_trained and (num_parts > 1 or shard_grad_dtype != grad_dtype or settings.cpu_offload),
        holds_experts=holds_experts,
        accumulated_in_fp32=accumulated_in_fp32(found, grad_dtype, settings) if is_trained else frozenset(),
        is_trained=is_trained,
        buckets=tuple(buckets),
    )
