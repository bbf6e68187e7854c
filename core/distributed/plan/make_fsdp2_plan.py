"""Plans a model that FSDP2 is to shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import ParallelConfigError, warn_once
from ...local_parts import local_part
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..fully_sharded_data_parallel_config import Reshard, parse_overrides
from ..groups import DataParallelGroups, is_expert_parameter
from ..torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from .parts import ParamPlan, PieceKind, PiecePlan, UnitPlan
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
from .transforms import plan_transforms
from .units import ParameterNames, UnitChoice, UnitModules, find_units, own_parameters
from .values import Plan

_BUFFER_FIELDS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "bucket_size",
    "num_buckets",
    "pad_buckets_for_high_nccl_busbw",
    "average_in_collective",
)


def plan_fsdp2(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice],
    *,
    caller: str,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Plan:
    """Plans a model on FSDP2; see `plan_model`.

    Args:
        unit_classes: as `find_units` takes them.
        mp_policy: torch's own, in place of the dtypes of the settings and of the model's config.
    """
    settings = _own_settings(ddp_config)
    policy = mp_policy or mixed_precision_policy(module.parameters(), compute_dtype(config), settings)
    units = find_units(module, unit_classes, splits_experts=groups.experts is not None)
    names, with_root = ParameterNames(module), [*units, UnitModules((module,), ("",))]
    own = list(own_parameters(with_root))
    # A unit's own parameters are all of experts, or none is.
    shard_sizes = [(groups.of(params[0]) if params else groups).shard.size() for params in own]
    kept, reshards = _kept_between_micro_batches(units, settings), _reshards(units, settings, shard_sizes)
    pieces = [_pieces(names, params, policy, size) for params, size in zip(own, shard_sizes, strict=True)]
    trained = [
        param.places[0] for of_unit in pieces for piece in of_unit if piece.is_trained for param in piece.params
    ]
    planned = []
    for index, (unit, reshard) in enumerate(zip(with_root, reshards, strict=True)):
        is_root, is_needed = index == len(units), unit.is_needed_in_backward
        is_kept = _keeps(settings) != "none" if is_root else unit in kept
        # Backward begins with the root, and runs from the loss to the first trained weight.
        last = max((param.places[0] for piece in pieces[index] for param in piece.params), default=-1)
        in_backward = is_needed and (is_root or (bool(trained) and last >= min(trained)))
        # Where no backward gathers it, a unit that some ranks keep would never be gathered again.
        kept_among = reshard if is_needed and not isinstance(reshard, bool) else None
        planned.append(
            UnitPlan(
                modules=unit.modules,
                names=unit.names,
                pieces=pieces[index],
                # Only the model's outputs are cast, as `Float16Module` does.
                precision=policy if is_root else replace(policy, output_dtype=None),
                is_gathered=True,
                is_freed=reshard is not False,
                kept_among=kept_among,
                is_needed_in_backward=is_needed,
                stays_whole=reshard is False or (is_kept and not is_needed),
                gathered_again_over=(kept_among or shard_sizes[index]) if reshard is not False and in_backward else 0,
                is_kept=is_kept,
            )
        )
    computed = [(policy.param_dtype or p.dtype, p.dtype) for p in module.parameters() if p.is_floating_point()]
    check_one_rounding(settings, ((policy.reduce_dtype or computes_in, kept) for computes_in, kept in computed))
    given = {f.name: getattr(policy, f.name) for f in fields(policy)} if mp_policy is not None else {}
    return Plan(
        **common_plan(config, settings, groups, caller=caller, given=given),
        **gathering_plan(settings),
        transforms=plan_transforms(units, settings),
        units=tuple(planned),
        collectives=settings.collectives,
        adds_gradient_rows=bool(getattr(config, "gradient_accumulation_fusion", True)),
    )


def units_at_the_ends(units: Sequence[UnitModules]) -> list[UnitModules]:
    """Returns the units that a micro-batch begins and ends with, and those that no backward gathers.

    The first is in memory when a backward ends and a forward begins, the last when a forward ends and a backward
    begins.
    """
    whole = [unit for unit in units if not unit.is_minority]
    in_backward = [unit for unit in whole if unit.is_needed_in_backward]
    ends = [*in_backward[:1], *whole[-1:]]
    return [unit for unit in units if unit in ends or not unit.is_needed_in_backward]


def _keeps(settings: TorchFullyShardedDataParallelConfig) -> str:
    asked = settings.keep_gathered_between_micro_batches
    return "none" if asked == "ends" and settings.reduce_every_micro_batch else asked


def _kept_between_micro_batches(
    units: Sequence[UnitModules], settings: TorchFullyShardedDataParallelConfig
) -> list[UnitModules]:
    keeps = _keeps(settings)
    return list(units) if keeps == "all" else units_at_the_ends(units) if keeps == "ends" else []


def _reshards(
    units: Sequence[UnitModules], settings: TorchFullyShardedDataParallelConfig, shard_sizes: Sequence[int]
) -> list[Reshard]:
    """Returns for each unit, and last for the root, whether it is freed after its forward.

    The last unit and the root stay gathered, because backward begins with them, unless an override names them.
    """
    overrides = parse_overrides(settings.reshard_overrides)
    keeps_all = settings.keep_gathered_between_micro_batches == "all"
    default: Reshard = False if keeps_all else settings.reshard_after_forward
    last = next((unit for unit in reversed(units) if not unit.is_minority), None)
    found: list[Reshard] = []
    for unit, shard_size in zip([*units, None], shard_sizes, strict=True):
        name = "" if unit is None else unit.names[0]
        stays = unit is None or unit is last
        found.append(check_reshard(reshard_of(name, False if stays else default, overrides), shard_size))
    return found


def _pieces(
    names: ParameterNames, params: Iterable[nn.Parameter], policy: MixedPrecisionPolicy, num_shards: int
) -> tuple[PiecePlan, ...]:
    """Returns a unit's parameters by their dtype, and whether they are trained."""
    pieces: dict[PieceKind, list[ParamPlan]] = {}
    for param in params:
        gathered_dtype = _cast(param.dtype, policy.param_dtype)
        kind = PieceKind(
            is_trained=param.requires_grad,
            holds_experts=is_expert_parameter(param),
            param_dtype=param.dtype,
            gathered_dtype=gathered_dtype,
            grad_dtype=_cast(gathered_dtype, policy.reduce_dtype),
            shard_grad_dtype=param.dtype,
            device=param.device,
            num_param_shards=num_shards,
        )
        pieces.setdefault(kind, []).append(_cut_by_rows(names, param, num_shards))
    return tuple(PiecePlan(**vars(kind), params=tuple(own)) for kind, own in pieces.items())


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _cut_by_rows(names: ParameterNames, parameter: nn.Parameter, shard_size: int) -> ParamPlan:
    """Cuts the first dimension as `torch.chunk` does; the part that tensor parallelism has left of a DTensor."""
    local = local_part(parameter.detach())
    rows = local.shape[0] if local.ndim else 1
    row_numel = local.numel() // rows if rows else 0
    chunk = -(-rows // shard_size)
    return names.plan_of(
        parameter,
        shape=tuple(local.shape),
        cut="rows",
        bounds=tuple(min(index * chunk, rows) * row_numel for index in range(shard_size + 1)),
    )


def _own_settings(ddp_config: DistributedDataParallelConfig) -> TorchFullyShardedDataParallelConfig:
    """Returns FSDP2's own settings, or their defaults; raises or warns on what FSDP2 does not have."""
    if ddp_config.sharding_strategy in ("optim", "optim_grads"):
        raise ParallelConfigError(
            f"TorchFullyShardedDataParallel shards parameters too, but the sharding strategy is "
            f"{ddp_config.sharding_strategy!r}; leave it at its default or set 'optim_grads_params'"
        )
    if ddp_config.reduce_scatter_with_fp32_accumulation:
        raise ParallelConfigError(
            "reduce_scatter_with_fp32_accumulation adds fp16 and bf16 gradients in fp32 while it sends them as they "
            "are, which FSDP2 cannot; drop it, or set grad_reduce_in_fp32, which sends them in fp32"
        )
    if ddp_config.param_name_patterns_for_fp32_local_accumulation:
        raise ParallelConfigError(
            "param_name_patterns_for_fp32_local_accumulation adds up gradients in fp32 before they are reduced in "
            "their own precision, which FSDP2 cannot; drop it, or set grad_reduce_in_fp32"
        )
    settings = settings_as(TorchFullyShardedDataParallelConfig, ddp_config)
    if settings.outer_dp_sharding_strategy != "no_shard":
        raise ParallelConfigError(
            f"outer_dp_sharding_strategy is {settings.outer_dp_sharding_strategy!r}, and FSDP2 replicates shards over "
            "optimizer instances; drop it, or use FullyShardedDataParallel"
        )
    if settings.shard_cut not in ("auto", "rows") or settings.shard_cut_overrides:
        raise ParallelConfigError(
            f"shard_cut is {settings.shard_cut!r} with overrides {list(settings.shard_cut_overrides)}, and FSDP2 "
            "always cuts by rows; drop it, or use FullyShardedDataParallel"
        )
    without_effect = [field for field in _BUFFER_FIELDS if getattr(ddp_config, field)]
    if without_effect:
        warn_once(
            f"{', '.join(without_effect)}: only wrappers with gradient buffers have these settings; FSDP2 reduces "
            "unit by unit and overlaps by itself. No number changes"
        )
    return settings
