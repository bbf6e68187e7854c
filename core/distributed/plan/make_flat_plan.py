"""Plans a model on flat buffers: whole parameters in buckets, or units of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ... import device
from ...dtypes import as_dtype
from ...errors import ParallelConfigError, WrapError, warn_once
from ...model_parallel_config import ModelParallelConfig
from ...pending_parameters import can_be_pending
from ...tensor_parallel.initialization import has_tensor_parallel_attributes
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..fully_sharded_data_parallel_config import (
    FullyShardedDataParallelConfig,
    Reshard,
    ShardCut,
    parse_cut,
    parse_cut_overrides,
    parse_overrides,
)
from ..groups import DataParallelGroups, is_expert_parameter
from .layout import BucketLayout, Cut, FullParamLayout, default_bucket_size, lay_out, lay_out_unit
from .parts import BufferPlan, PieceKind, PiecePlan, UnitPlan
from .settings import (
    check_one_rounding,
    check_reshard,
    common_plan,
    compute_dtype,
    gathering_plan,
    mixed_precision_policy,
    reshard_of,
    settings_as,
)
from .transforms import plan_transforms, transforms_units
from .units import ParameterNames, UnitChoice, UnitModules, find_units, own_parameters
from .values import Plan

_Places = tuple[tuple[int, int], ...]
"""Buffer and bucket of each piece of a unit."""


def plan_whole(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice] = (),
    *,
    caller: str,
    disable_bucketing: bool = False,
    finish_in_backward: bool = False,
) -> Plan:
    """Plans a model for `DistributedDataParallel`; see `plan_model`. Each bucket is a unit that is always whole.

    Args:
        unit_classes: of modules that are recomputed or compiled, where that is asked for.
        disable_bucketing: reduce each buffer in one piece; the bucket size is ignored.
        finish_in_backward: as of `DistributedDataParallel`.
    """
    strategy = ddp_config.sharding_strategy
    if ddp_config.shards_parameters:
        raise ParallelConfigError(
            f"{caller} keeps whole parameters, but the sharding strategy is {strategy!r}; use wrap_model, or "
            "TorchFullyShardedDataParallel"
        )
    check_precision(config, module)
    is_sharded = strategy != "no_shard"
    if finish_in_backward and is_sharded:
        raise ParallelConfigError(
            "finish_in_backward leaves whole gradients in param.grad, and the sharding strategy "
            f"{strategy!r} leaves a rank its shard; drop one of the two"
        )
    if finish_in_backward and ddp_config.reproducible_across_ranks:
        raise ParallelConfigError(
            "finish_in_backward reduces gradients after each backward, and reproducible_across_ranks when all "
            "micro-batches of a step are added; drop one of the two"
        )
    overlaps_grads = _overlaps(ddp_config.overlap_grad_reduce)
    overlaps_params = _overlaps(ddp_config.overlap_param_gather, by_default=is_sharded)
    reduces_during_backward = overlaps_grads or strategy == "optim_grads"
    bucket_size, num_buckets = ddp_config.bucket_size, ddp_config.num_buckets
    if disable_bucketing:
        bucket_size = num_buckets = None
    elif bucket_size is None and num_buckets is None and (reduces_during_backward or (overlaps_params and is_sharded)):
        bucket_size = default_bucket_size(groups.whole.size())
    kinds = _Kinds(ddp_config, groups)

    def lay_out_buckets(params: Sequence[nn.Parameter]) -> list[tuple[BucketLayout, Cut]]:
        layouts = lay_out_params(
            params,
            dp_size=groups.of(params[0]).whole.size() if is_sharded else None,
            bucket_size=bucket_size,
            num_buckets=num_buckets,
            for_high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
        )
        return [(layout, "flat") for layout in layouts]

    names = ParameterNames(module)
    for param in reversed(list(names.of)):
        _reject_unfit_parameter(names.of[param][0], param)
    trained = [param for param in names.of if param.requires_grad]
    buffers, _ = _fill_buffers([(trained, lay_out_buckets)], names, kinds)
    buckets = tuple(
        UnitPlan(pieces=(bucket,), buckets=((index, number),))
        for index, buffer in enumerate(buffers)
        for number, bucket in enumerate(buffer.buckets)
    )
    # Gradients travel by bucket, so that modules are looked for only where something is done to them.
    units = find_units(module, unit_classes, splits_dtypes=False) if transforms_units(ddp_config) else []
    given = {"disable_bucketing": disable_bucketing, "finish_in_backward": finish_in_backward}
    return Plan(
        **_common(config, ddp_config, groups, caller, kinds.splits_updates, given=given),
        transforms=plan_transforms(units, ddp_config),
        units=(*buckets, UnitPlan(modules=(module,), names=("",), pieces=_frozen_pieces(names, kinds))),
        buffers=buffers,
        reduction_order=_order_of_reduction(buffers),
        reduces_during_backward=reduces_during_backward,
        overlaps_grads=overlaps_grads,
        overlaps_params=overlaps_params,
        finishes_in_backward=finish_in_backward,
    )


def plan_fully_sharded(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice],
    *,
    caller: str,
) -> Plan:
    """Plans a model for `FullyShardedDataParallel`; see `plan_model`."""
    settings = _own_settings(ddp_config, caller)
    precision = mixed_precision_policy(module.parameters(), compute_dtype(config), settings)
    names, is_shared_update = ParameterNames(module), _shares_update(settings, groups)
    kinds = _Kinds(settings, groups, is_shared_update, precision.param_dtype)
    units = [*find_units(module, unit_classes, splits_dtypes=False), UnitModules((module,), ("",))]

    def laid_out_as(unit: UnitModules) -> _LayOut:
        cut, pads = _cut_of(unit, settings), settings.pad_buckets_for_high_nccl_busbw
        return lambda params: [
            lay_out_unit([p.shape for p in params], kinds.num_parts(params[0]), cut, for_high_busbw=pads)
        ]

    own = list(own_parameters(units))
    for param in (param for params in own for param in reversed(params)):
        _reject_unfit_parameter(names.of[param][0], param)
        _reject_unpendable_parameter(names.of[param][0], param)
    params_of = [(params, laid_out_as(unit)) for params, unit in zip(own, units, strict=True)]
    buffers, places = _fill_buffers(params_of, names, kinds)
    check_one_rounding(
        settings, ((buffer.grad_dtype, buffer.shard_grad_dtype) for buffer in buffers if buffer.is_trained)
    )
    # Where one rank has all, in one dtype and place, parameters are views of the shards themselves.
    num_shards = groups.shard.size()
    is_whole = num_shards == 1 and precision.param_dtype is None and not settings.cpu_offload
    return Plan(
        **_common(config, settings, groups, caller, kinds.splits_updates),
        **gathering_plan(settings),
        transforms=plan_transforms(units[:-1], settings),
        units=_plan_units(units, places, buffers, settings, precision, num_shards, has_slots=not is_whole),
        buffers=buffers,
        reduction_order=_order_of_reduction(buffers),
        overlaps_params=settings.forward_prefetch > 0 or settings.backward_prefetch > 0,
        shards_update_over_replicas=is_shared_update,
    )


def _common(
    config: Any,
    settings: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    caller: str,
    splits_updates: bool,
    **options: Any,
) -> dict[str, Any]:
    """Returns the fields that follow from settings alone, for any strategy."""
    if getattr(config, "calculate_per_token_loss", False) and settings.average_in_collective:
        raise ParallelConfigError(
            "calculate_per_token_loss sums gradients over ranks and average_in_collective averages them; drop one"
        )
    common = common_plan(config, settings, groups, caller=caller, **options)
    common["reduces_every_micro_batch"] &= splits_updates
    # The layers of this library compute gradients in lent memory, unless ``gradient_accumulation_fusion`` is False. In
    # a config of another library True says that layers add to ``main_grad`` themselves.
    is_fused = bool(getattr(config, "gradient_accumulation_fusion", True))
    is_of_another = hasattr(config, "gradient_accumulation_fusion") and not isinstance(config, ModelParallelConfig)
    return {
        **common,
        "averages_in_collective": settings.average_in_collective,
        "adds_in_fp32": settings.reduce_scatter_with_fp32_accumulation,
        "lends_gradients": is_fused,
        "layers_add_gradients": is_fused and is_of_another,
    }


_LayOut = Callable[[Sequence[nn.Parameter]], list[tuple[BucketLayout, Cut]]]
"""Places parameters of one kind in buckets, one behind the other."""


@dataclass(frozen=True)
class _Kinds:
    """Tells which parameters share a buffer.

    Args:
        groups: the ranks; None where only kinds matter.
        shares_updates: ranks with the same shard share its update.
        computes_in: the dtype that the model sees; None is each parameter's.
    """

    settings: DistributedDataParallelConfig
    groups: DataParallelGroups | None = None
    shares_updates: bool = False
    computes_in: torch.dtype | None = None

    def num_shards(self, param: nn.Parameter) -> int:
        """Returns the number of ranks that shard a parameter, or its optimizer state."""
        return 1 if self.groups is None or self.strategy == "no_shard" else self.groups.of(param).shard.size()

    def num_parts(self, param: nn.Parameter) -> int:
        """Returns the number of ranks that share a parameter's update."""
        replicas = self.groups.of(param).num_replicas if self.groups is not None and self.shares_updates else 1
        return self.num_shards(param) * replicas

    @property
    def splits_updates(self) -> bool:
        """Whether ranks share the updates of parameters; of experts they may not, where each is on one rank."""
        if self.groups is None or self.strategy == "no_shard":
            return False
        return self.groups.shard.size() * (self.groups.num_replicas if self.shares_updates else 1) > 1

    def of(self, param: nn.Parameter) -> PieceKind:
        settings, is_sharded = self.settings, self.settings.shards_parameters
        gathered_dtype = (self.computes_in if param.is_floating_point() else None) or param.dtype
        asked = getattr(settings, "reduce_dtype", None) if is_sharded else None
        grad_dtype = as_dtype(asked) or gathered_dtype
        if settings.grad_reduce_in_fp32:  # to add more exactly, so double precision stays
            grad_dtype = torch.promote_types(grad_dtype, torch.float32)
        shard_grad_dtype = torch.promote_types(grad_dtype, param.dtype) if is_sharded else grad_dtype
        is_reduced_apart = (
            self.splits_updates or shard_grad_dtype != grad_dtype or getattr(settings, "cpu_offload", False)
        )
        releases_grads = is_reduced_apart if is_sharded else self.strategy == "optim_grads" and self.splits_updates
        return PieceKind(
            is_trained=param.requires_grad,
            holds_experts=is_expert_parameter(param),
            param_dtype=param.dtype,
            gathered_dtype=gathered_dtype,
            grad_dtype=grad_dtype,
            shard_grad_dtype=shard_grad_dtype,
            device=device.current_device() if param.is_meta else param.device,  # where it will be materialized
            num_param_shards=self.num_shards(param) if is_sharded else 1,
            holds_params=self.strategy != "no_shard",
            releases_grads=param.requires_grad and bool(releases_grads),
        )

    @property
    def strategy(self) -> str:
        return self.settings.sharding_strategy

    def accumulate_in_fp32(self, name: str, kind: PieceKind) -> bool:
        """Returns whether the gradient of a parameter adds up in fp32 memory of its own."""
        if not kind.is_trained or torch.promote_types(kind.grad_dtype, torch.float32) == kind.grad_dtype:
            return False
        patterns = self.settings.param_name_patterns_for_fp32_local_accumulation
        return any(pattern == "all" or fnmatch(name, pattern) for pattern in patterns)


def _fill_buffers(
    params_of: Iterable[tuple[Sequence[nn.Parameter], _LayOut]], names: ParameterNames, kinds: _Kinds
) -> tuple[tuple[BufferPlan, ...], list[_Places]]:
    """Puts parameters into one buffer for each kind, in reverse order of construction.

    Args:
        params_of: the parameters that are laid out together, as those of a unit, and how.

    Returns:
        the buffers; and for each entry of `params_of` its buckets.
    """
    buckets: dict[PieceKind, list[PiecePlan]] = {}
    placed: dict[PieceKind, int] = {}
    keys: list[list[tuple[PieceKind, int]]] = []
    for params, lay_out_params in params_of:
        keys.append([])
        by_kind: dict[PieceKind, list[nn.Parameter]] = {}
        for param in reversed(params):
            by_kind.setdefault(kinds.of(param), []).append(param)
        for kind, of_kind in by_kind.items():
            filled = buckets.setdefault(kind, [])
            end = filled[-1].layout.end if filled else 0
            for layout, cut in lay_out_params(of_kind):
                first = placed.get(kind, 0)
                placed[kind] = first + len(layout.members)
                keys[-1].append((kind, len(filled)))
                moved = replace(
                    layout,
                    start=end + layout.start,
                    end=end + layout.end,
                    members=tuple(range(first, placed[kind])),
                )
                filled.append(_bucket([of_kind[i] for i in layout.members], moved, cut, kind, names, kinds))
    index_of = {kind: index for index, kind in enumerate(buckets)}
    buffers = tuple(BufferPlan(**vars(kind), buckets=tuple(filled)) for kind, filled in buckets.items())
    return buffers, [tuple((index_of[kind], number) for kind, number in own) for own in keys]


def _bucket(
    params: Sequence[nn.Parameter],
    layout: BucketLayout,
    cut: Cut,
    kind: PieceKind,
    names: ParameterNames,
    kinds: _Kinds,
) -> PiecePlan:
    """Returns the bucket of a layout of these parameters, each of its shards a part of its elements."""
    num_parts = kinds.num_parts(params[0])
    length = (layout.end - layout.start) // num_parts
    planned = []
    for param, (start, end) in zip(params, layout.ranges, strict=True):
        bounds = [0, *(min(max(length * shard, start), end) - start for shard in range(1, num_parts)), end - start]
        planned.append(
            names.plan_of(
                param,
                shape=tuple(param.shape),
                cut=cut if num_parts > 1 else "whole",
                bounds=tuple(bounds),
                accumulates_in_fp32=kinds.accumulate_in_fp32(names.of[param][0], kind),
            )
        )
    return PiecePlan(**vars(kind), params=tuple(planned), layout=layout)


def _frozen_pieces(names: ParameterNames, kinds: _Kinds) -> tuple[PiecePlan, ...]:
    """Returns the parameters that have no gradient, which are whole on every rank and never move."""
    pieces: dict[PieceKind, list[nn.Parameter]] = {}
    for param in names.of:
        if not param.requires_grad:
            pieces.setdefault(kinds.of(param), []).append(param)
    return tuple(
        PiecePlan(
            **vars(kind),
            params=tuple(
                names.plan_of(param, shape=tuple(param.shape), cut="whole", bounds=(0, param.numel()))
                for param in params
            ),
        )
        for kind, params in pieces.items()
    )


def _plan_units(
    units: Sequence[UnitModules],
    places: Sequence[_Places],
    buffers: Sequence[BufferPlan],
    settings: FullyShardedDataParallelConfig,
    precision: MixedPrecisionPolicy,
    num_shards: int,
    *,
    has_slots: bool,
) -> tuple[UnitPlan, ...]:
    """Decides of each unit whether it is freed after its forward, and which memory it is gathered into."""
    pieces = [tuple(buffers[index].buckets[number] for index, number in own) for own in places]
    reshards = [*(_reshards(unit, settings, num_shards) for unit in units[:-1]), False]
    for unit, reshard, of in zip(units, reshards, pieces, strict=True):
        if not isinstance(reshard, bool) and any(piece.holds_experts for piece in of):
            raise ParallelConfigError(
                f"reshard_after_forward is {reshard} for {unit.names[0]}, which has experts, and these are sharded "
                f"over other ranks; set True or False by reshard_overrides=({unit.names[0] + '=True'!r},)"
            )
    sizes = [
        tuple((own[i][0], piece.elements) for i, piece in enumerate(of))
        for own, of in zip(places, pieces, strict=True)
    ]
    in_use = 1 + max(settings.forward_prefetch, settings.backward_prefetch)
    slots = _slots(sizes, [reshard is not False for reshard in reshards], in_use)
    planned = []
    for index, (unit, reshard, slot) in enumerate(zip(units, reshards, slots, strict=True)):
        has_slot, is_needed = has_slots and bool(pieces[index]), unit.is_needed_in_backward
        kept_among = reshard if not isinstance(reshard, bool) and is_needed else None
        # The last unit of a slot is there when backward begins, and the first one when the next forward does.
        is_last = not has_slot or slot not in slots[index + 1 :]
        is_first = not has_slot or slot not in slots[:index]
        planned.append(
            UnitPlan(
                modules=unit.modules,
                names=unit.names,
                pieces=pieces[index],
                buckets=places[index],
                precision=precision if index == len(units) - 1 else replace(precision, output_dtype=None),
                is_gathered=True,
                slot=slot if has_slot else None,
                is_freed=reshard is not False,
                kept_among=kept_among,
                is_needed_in_backward=is_needed,
                stays_whole=is_first and is_last,
                gathered_again_over=0 if is_last or not is_needed else kept_among or num_shards,
                is_kept=is_first,
            )
        )
    return tuple(planned)


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


def _reject_unfit_parameter(name: str, param: nn.Parameter) -> None:
    """Raises where a parameter cannot be moved into a flat buffer."""
    if isinstance(param, DTensor):
        raise WrapError(f"parameter {name} is a DTensor; flat buffers take plain tensors, FSDP2 takes these")
    if hasattr(param, "has_buffer"):
        raise WrapError(f"parameter {name} is in the buffers of a wrapper already; wrap the plain model")


def _reject_unpendable_parameter(name: str, param: nn.Parameter) -> None:
    """Raises where readers of a parameter cannot be made to wait for it."""
    if not can_be_pending(param):
        raise WrapError(
            f"parameter {name} is a {type(param).__name__}, and FullyShardedDataParallel makes readers of a parameter "
            "wait by its class, nn.Parameter; make it an nn.Parameter, or use TorchFullyShardedDataParallel"
        )


def _overlaps(asked: bool | None, by_default: bool = True) -> bool:
    return by_default and device.device_type() == "cuda" if asked is None else asked


def full_param_layout(
    params: Sequence[nn.Parameter],
    bucket_size: int | None,
    dp_size: int,
    ddp_config: DistributedDataParallelConfig,
) -> FullParamLayout:
    """Returns the places that `plan_whole` gives these parameters where a strategy shards.

    Args:
        params: those that require gradients, in order.
        bucket_size: elements; None means one bucket for each kind of parameter, unless `ddp_config` says how many.
        dp_size: ranks that share a bucket.
    """
    kinds: dict[PieceKind, list[nn.Parameter]] = {}
    for param in reversed(params):
        kinds.setdefault(_Kinds(ddp_config).of(param), []).append(param)
    options: dict[str, Any] = {
        "num_buckets": ddp_config.num_buckets,
        "for_high_busbw": ddp_config.pad_buckets_for_high_nccl_busbw,
    }
    return FullParamLayout(
        tuple(
            tuple(lay_out_params(of_kind, dp_size=dp_size, bucket_size=bucket_size, **options))
            for of_kind in kinds.values()
        )
    )


def lay_out_params(params: Sequence[nn.Parameter], *, dp_size: int | None, **options: Any) -> list[BucketLayout]:
    """Lays out parameters, which come in reverse order of construction. `options` go to `lay_out`.

    Where buckets are cut, a weight that carries ``shared_embedding`` has one of its own, as in Megatron-LM: it is read
    outside its module too. Weights of tensor-parallel layers are aligned, since their gradients are computed in place.
    """
    shared = [index for index, param in enumerate(params) if getattr(param, "shared_embedding", False)]
    return lay_out(
        [param.numel() for param in params],
        dp_size=dp_size,
        alone=shared if dp_size else (),
        aligned={index for index, param in enumerate(params) if has_tensor_parallel_attributes(param)},
        **options,
    )


def _order_of_reduction(buffers: Sequence[BufferPlan]) -> tuple[tuple[int, int], ...]:
    """Returns buckets in the order in which backward should finish them: by their first parameter, the last first."""
    place = {
        (index, number): bucket.place
        for index, buffer in enumerate(buffers)
        if buffer.is_trained
        for number, bucket in enumerate(buffer.buckets)
    }
    return tuple(sorted(place, key=lambda key: -place[key]))


def check_precision(config: Any, module: nn.Module) -> None:
    """Raises where a model is to compute in half precision, and all its parameters are fp32."""
    asked = next((name for name in ("bf16", "fp16") if getattr(config, name, False)), None)
    if asked and all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        raise ParallelConfigError(
            f"config.{asked} is set, but every parameter is fp32, and flat buffers compute in the dtype of their "
            "parameters; wrap the model in Float16Module(config, model) first"
        )
