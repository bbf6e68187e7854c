"""Plans a model: reads its settings, finds its units, and decides what each of them keeps, gathers and sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...base.dtypes import dtype_name
from ...base.errors import ParallelConfigError
from ..distributed_data_parallel_config import DistributedDataParallelConfig, EngineKind
from ..fully_sharded_data_parallel_config import FullyShardedDataParallelConfig, Reshard
from ..groups import DataParallelGroups, ParameterKind, kind_of, managed_parameters
from .layout import BucketLayout, default_bucket_size, lay_out_unit
from .parts import PiecePlan, UnitPlan, UnitTransform
from .pieces import Pieces, grain_of, lay_out_params, mixed_precision_policy
from .settings import (
    Settings,
    changed_settings,
    check_contradictions,
    check_reshard,
    config_of_engine,
    read_settings,
    resolve_settings,
    settings_to_compare,
)
from .units import (
    UnitChoice,
    default_units,
    find_units,
    params_of_units,
    plan_transforms,
    resolve_names,
    unit_of,
    warn_of_large_root,
)
from .values import Plan


def plan_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice] | None = None,
    *,
    engine: EngineKind | None = None,
    caller: str = "plan_model",
    disable_bucketing: bool = False,
    finish_in_backward: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Plan:
    """Plans what a wrapper does to a model. Every wrapper is built from the result.

    Args:
        module: the model, on any device, the meta device too; it is only read.
        config: the model's, any object; ``bf16``, ``calculate_per_token_loss`` and the like are read where present.
        unit_classes: of the units, as of `find_units`. None means `default_units` of the model.
        engine: None means the engine that the settings choose.
        caller: the function or class that messages name.
        disable_bucketing: reduce each buffer of whole gradients in one piece; the bucket size is ignored.
        finish_in_backward: finish gradients at the end of each backward; see `DistributedDataParallel`.
        mp_policy: torch's own, in place of the dtypes of the settings and of the model's config.

    Raises:
        ParallelConfigError: settings that the engine cannot honour, or that this model or these ranks cannot have.
        WrapError: an entry of `unit_classes` that is no module class, or a parameter that the engine cannot hold.
    """
    engine = ddp_config.engine if engine is None else engine
    own = config_of_engine(ddp_config, engine, caller)
    settings = resolve_settings(own, config, module, groups, engine, finish_in_backward)
    choices = None if unit_classes is None else resolve_names(module, unit_classes)
    if isinstance(own, FullyShardedDataParallelConfig):
        units = _plan_units(module, config, own, groups, choices, engine, mp_policy)
        blocks: Sequence[UnitPlan] = units[:-1]
    else:
        units = _plan_buckets(module, own, settings, groups, disable_bucketing)
        blocks = ()
        if own.transforms_units:  # modules are only recomputed or compiled: gradients travel by bucket
            blocks = find_units(module, default_units(module) if choices is None else choices, splits_dtypes=False)
    check_contradictions(config, own, groups, [piece for unit in units for piece in unit.pieces])
    transforms = plan_transforms(blocks, own)
    if engine is EngineKind.FSDP2:
        _reject_units_in_selective_ones(transforms, units)
        _reject_codes_of_several_dtypes(units)
    compared = settings_to_compare(own, config, disable_bucketing, finish_in_backward, mp_policy)
    return Plan(
        caller=caller,
        engine=engine,
        strategy=own.sharding_strategy,
        groups=groups,
        tensor_parallel_size=getattr(config, "tensor_model_parallel_size", 1),
        context_parallel_size=getattr(config, "context_parallel_size", 1),
        settings=settings,
        compared_settings=(("the wrapper", caller), *compared),
        changed_settings=changed_settings(own),
        model_settings=read_settings(config),
        sums_gradients=bool(getattr(config, "calculate_per_token_loss", False)),
        units=units,
        transforms=transforms,
    )


def _plan_buckets(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    settings: Settings,
    groups: DataParallelGroups,
    disable_bucketing: bool,
) -> tuple[UnitPlan, ...]:
    """Plans a model whose parameters are whole on every rank. Each bucket of gradients is a unit."""
    is_sharded, bucket_size = ddp_config.shards_updates, None if disable_bucketing else ddp_config.bucket_size
    travels_early = settings.overlap_grad_reduce or ddp_config.sharding_strategy == "optim_grads"
    travels_early = travels_early or (settings.overlap_param_gather and is_sharded)
    if bucket_size is None and travels_early and not disable_bucketing:
        bucket_size = default_bucket_size(groups.whole.size())

    def lay_out_buckets(params: Sequence[nn.Parameter]) -> list[BucketLayout]:
        is_cut = is_sharded or ddp_config.grad_comm_dtype is not None  # ranks add their parts, and gather the sums
        dp_size = groups.of(params[0]).whole.size() if is_cut else None
        return lay_out_params(params, dp_size, bucket_size, grain_of(params, ddp_config))

    pieces = Pieces(module, EngineKind.FLAT_BUFFERS, ddp_config, groups=groups)
    params = [param for param in pieces.names.of if kind_of(param) != "ignored"]
    buckets = pieces.in_buffers([param for param in params if param.requires_grad], lay_out_buckets)
    frozen = pieces.by_rows((param for param in params if not param.requires_grad), is_cut=False)
    root = UnitPlan(modules=(module,), names=("",), pieces=frozen)
    return (*(UnitPlan(pieces=(bucket,)) for bucket in buckets), root)


def _plan_units(
    module: nn.Module,
    config: Any,
    ddp_config: FullyShardedDataParallelConfig,
    groups: DataParallelGroups,
    choices: tuple[UnitChoice, ...] | None,
    engine: EngineKind,
    mp_policy: MixedPrecisionPolicy | None,
) -> tuple[UnitPlan, ...]:
    """Plans a model whose ranks share its parameters, and gather them a unit at a time."""
    is_fsdp2, num_shards = engine is EngineKind.FSDP2, groups.shard.size()
    managed = (parameter for _, parameter in managed_parameters(module))
    precision = mp_policy or mixed_precision_policy(managed, config, ddp_config)
    pieces = Pieces(module, engine, ddp_config, precision, groups=groups)

    def pieces_of(unit: UnitPlan, params: list[nn.Parameter]) -> tuple[PiecePlan, ...]:
        if is_fsdp2:
            return pieces.by_rows(params)
        cut = ddp_config.cut_of(unit.names[0])

        def lay_out_kind(of: Sequence[nn.Parameter]) -> list[BucketLayout]:
            num_parts, grain = pieces.num_parts(kind_of(of[0])), grain_of(of, ddp_config)
            return [lay_out_unit([p.shape for p in of], num_parts, cut, grain)]

        return pieces.in_buffers(params, lay_out_kind)

    apart: dict[ParameterKind, Any] = {"expert": groups.experts, "replicated": groups.replicated}
    kinds = [kind for kind, ranks in apart.items() if ranks is not None]
    classes = default_units(module) if choices is None else choices
    bare_units = find_units(module, classes, splits_dtypes=is_fsdp2, kinds=kinds)
    bare_units.append(unit_of((module,), {module: ""}))
    params_of = list(params_of_units(bare_units))
    if num_shards > 1 and choices != ():  # which asks for no unit
        warn_of_large_root(bare_units, params_of, classes)
    units = []
    for unit, params, reshard in zip(
        bare_units, params_of, _reshards(bare_units, ddp_config, num_shards, is_fsdp2), strict=True
    ):
        planned = replace(
            unit,
            pieces=pieces_of(unit, params),
            # Only the model's outputs are cast, as `Float16Module` does.
            precision=precision if unit is bare_units[-1] else replace(precision, output_dtype=None),
            is_gathered=True,
            is_freed=reshard is not False,
        )
        # Where no backward gathers it, a unit that some ranks keep would never be gathered again.
        if unit.is_needed_in_backward and not isinstance(reshard, bool) and planned.kind != "replicated":
            if kinds:
                _reject_kinds_among_neighbours(planned, reshard)
            planned = replace(planned, kept_among=reshard)
        units.append(planned)
    if is_fsdp2:
        return tuple(_keep_by_torch(units, ddp_config, num_shards))
    is_cast = precision.param_dtype is not None or ddp_config.param_comm_dtype is not None
    return tuple(_keep_in_slots(units, ddp_config, num_shards, is_cast=is_cast))


def _reshards(
    units: Sequence[UnitPlan], ddp_config: FullyShardedDataParallelConfig, num_shards: int, is_fsdp2: bool
) -> Iterator[Reshard]:
    """Yields for each unit whether it is freed after its forward: False, True, or the number of ranks that keep it.

    The root stays gathered, and under FSDP2 the last unit, because backward begins with them. There an override may
    name them.
    """
    keeps_all = ddp_config.keep_gathered_between_micro_batches == "all"
    last = next((unit for unit in reversed(units[:-1]) if not unit.is_minority), None)
    for unit in units:
        is_root = unit is units[-1]
        stays = keeps_all or is_root or (is_fsdp2 and unit is last)
        default = False if stays else ddp_config.reshard_after_forward
        reshard = ddp_config.reshard_of(unit.names[0], default) if is_fsdp2 or not is_root else False
        yield check_reshard(reshard, num_shards)


def _reject_kinds_among_neighbours(unit: UnitPlan, kept_among: int) -> None:
    if kind := next((piece.kind for piece in unit.pieces if piece.kind != "dense"), None):
        name = unit.names[0]
        raise ParallelConfigError(
            f"reshard_after_forward is {kept_among} for {name}, which has {kind} parameters, and these are "
            f"sharded over other ranks; set True or False by reshard_overrides=({name + '=True'!r},)"
        )


def _reject_units_in_selective_ones(transforms: Iterable[UnitTransform], units: Iterable[UnitPlan]) -> None:
    """Raises if FSDP2 would enter another unit, of experts or replicated, inside of a selective recomputation.

    Torch counts operations of its hooks as those of the layer, and a backward has more of them, gathered or not.
    """
    selective = [module for t in transforms if t.recomputes == "selective" for module in t.modules]
    inside = {below for module in selective for below in module.modules() if below is not module}
    for unit in units:
        if unit.kind != "dense" and not inside.isdisjoint(unit.modules):
            what = "experts over ranks" if unit.kind == "expert" else "which is replicated"
            raise ParallelConfigError(
                f"activation_checkpointing is 'selective' for a unit around {unit.names[0]}, {what}, and FSDP2 runs "
                "that as a unit of its own; take 'full', or FullyShardedDataParallel"
            )


def _reject_codes_of_several_dtypes(units: Iterable[UnitPlan]) -> None:
    """Raises if FSDP2 would gather codes next to another dtype: torch then gathers bytes."""
    for unit in units:
        dtypes = sorted({dtype_name(piece.gathered_dtype) for piece in unit.pieces})
        if len(dtypes) > 1 and any(piece.param_format for piece in unit.pieces):
            raise ParallelConfigError(
                f"param_comm_dtype is set, and unit {unit.names[0] or 'of the model itself'} has parameters in "
                f"{' and '.join(dtypes)}, which FSDP2 gathers as bytes; cast them to one dtype, set param_dtype, or "
                "use FullyShardedDataParallel"
            )


def _keep_in_slots(
    units: Sequence[UnitPlan], ddp_config: FullyShardedDataParallelConfig, num_shards: int, *, is_cast: bool
) -> Iterator[UnitPlan]:
    """Decides which memory units of flat buffers are gathered into, and how long that memory keeps each unit.

    Units of one size that are freed share a few slots in turn: one in use, and one for each unit that is prefetched.
    Where this rank has all of a unit, in one dtype and place, its parameters are views of the shards themselves.
    """
    is_copied = is_cast or ddp_config.cpu_offload
    in_use = 1 + max(ddp_config.forward_prefetch, ddp_config.backward_prefetch)
    slots_of_size: dict[Hashable, list[int]] = {}
    slots: list[int] = []
    for unit in units:
        size = tuple((piece.bucket and piece.bucket[0], piece.elements) for piece in unit.pieces)
        of_size = slots_of_size.setdefault(size, []) if unit.is_freed else []
        # Not yet as many: a new one. Else the one that was taken longest ago.
        slot = of_size[-in_use] if len(of_size) >= in_use else max(slots, default=-1) + 1
        of_size.append(slot)
        slots.append(slot)
    for index, (unit, slot) in enumerate(zip(units, slots, strict=True)):
        has_slot = any(is_copied or piece.num_param_shards > 1 for piece in unit.pieces)
        # The last unit of a slot is there when backward begins, and the first one when the next forward does.
        is_last = not has_slot or slot not in slots[index + 1 :]
        is_first = not has_slot or slot not in slots[:index]
        again = 0 if is_last or not unit.is_needed_in_backward else unit.kept_among or num_shards
        own_slot, stays = slot if has_slot else None, is_first and is_last
        yield replace(unit, slot=own_slot, stays_whole=stays, gathered_again_over=again, is_kept=is_first)


def _keep_by_torch(
    units: Sequence[UnitPlan], ddp_config: FullyShardedDataParallelConfig, num_shards: int
) -> Iterator[UnitPlan]:
    """Decides which units FSDP2 keeps from one micro-batch to the next, and which a backward gathers again."""
    keeps = ddp_config.keep_gathered_between_micro_batches
    if keeps == "ends" and ddp_config.reduce_every_micro_batch:
        keeps = "none"
    ends = [*units_at_the_ends(units[:-1]), units[-1]]
    trained = [param.places[0] for unit in units for p in unit.pieces if p.is_trained for param in p.params]
    for unit in units:
        is_root, is_needed = unit is units[-1], unit.is_needed_in_backward
        is_kept = keeps == "all" or (keeps == "ends" and unit in ends)
        # Backward begins with the root, and runs from the loss to the first trained weight.
        last = max((param.places[0] for param in unit.params), default=-1)
        is_reached = is_root or (bool(trained) and last >= min(trained))
        ranks = unit.kept_among or max((piece.num_param_shards for piece in unit.pieces), default=num_shards)
        again = ranks if unit.is_freed and is_needed and is_reached else 0
        stays = not unit.is_freed or (is_kept and not is_needed)
        yield replace(unit, stays_whole=stays, gathered_again_over=again, is_kept=is_kept)


def units_at_the_ends(units: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Returns the units that a micro-batch begins and ends with, and those that no backward gathers.

    The first is in memory when a backward ends and a forward begins, the last when a forward ends and a backward
    begins.
    """
    whole = [unit for unit in units if not unit.is_minority]
    in_backward = [unit for unit in whole if unit.is_needed_in_backward]
    ends = [*in_backward[:1], *whole[-1:]]
    return [unit for unit in units if unit in ends or not unit.is_needed_in_backward]
