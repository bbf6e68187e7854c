"""Plans a model on flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ... import device
from ...dtypes import Dtype, as_dtype
from ...errors import ParallelConfigError, WrapError
from ...model_parallel_config import ModelParallelConfig
from ...tensor_parallel.initialization import has_tensor_parallel_attributes
from ..distributed_data_parallel_config import DistributedDataParallelConfig, shards_parameters
from ..groups import DataParallelGroups
from .common import common_plan
from .flat_plan import BucketPlan, BufferPlan, FlatPlan
from .layout import BucketLayout, FullParamLayout, default_bucket_size, lay_out
from .names import ParameterNames
from .transforms import plan_transforms, transforms_units
from .units import UnitChoice, find_units
from .values import Cut, ParamPlan


def plan_flat(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice] = (),
    *,
    caller: str,
    disable_bucketing: bool = False,
    finish_in_backward: bool = False,
) -> FlatPlan:
    """Plans a model on flat buffers; see `plan_model`.

    Args:
        unit_classes: of modules that are recomputed or compiled, where that is asked for.
        disable_bucketing: reduce each buffer in one piece; the bucket size is ignored.
        finish_in_backward: as of `DistributedDataParallel`.
    """
    strategy = ddp_config.sharding_strategy
    if shards_parameters(strategy):
        raise ParallelConfigError(
            f"{caller} keeps whole parameters, but the sharding strategy is {strategy!r}; use wrap_model, or "
            "TorchFullyShardedDataParallel"
        )
    check_reduction(config, ddp_config)
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
    names = ParameterNames(module)
    buffers = _plan_buffers(names, ddp_config, groups, bucket_size, num_buckets)
    # Gradients travel by bucket, so that units are looked for only where something is done to them.
    units = find_units(module, unit_classes, splits_dtypes=False) if transforms_units(ddp_config) else []
    given = {"disable_bucketing": disable_bucketing, "finish_in_backward": finish_in_backward}
    common = common_plan(config, ddp_config, groups, caller=caller, given=given)
    common["reduces_every_micro_batch"] &= groups.shard.size() > 1
    return FlatPlan(
        **common,
        **gradients_of_layers(config),
        transforms=plan_transforms(units, ddp_config),
        frozen=tuple(_whole(names, param) for param in names.of if not param.requires_grad),
        buffers=buffers,
        reduction_order=order_of_reduction(buffers),
        reduces_during_backward=reduces_during_backward,
        overlaps_grads=overlaps_grads,
        overlaps_params=overlaps_params,
        averages_in_collective=ddp_config.average_in_collective,
        adds_in_fp32=ddp_config.reduce_scatter_with_fp32_accumulation,
        finishes_in_backward=finish_in_backward,
    )


def _plan_buffers(
    names: ParameterNames,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    bucket_size: int | None,
    num_buckets: int | None,
) -> tuple[BufferPlan, ...]:
    """Plans one buffer for each kind of trained parameters, and the buckets in it."""
    is_sharded = ddp_config.sharding_strategy != "no_shard"
    num_shards = groups.shard.size() if is_sharded else 1
    buffers = []
    for (holds_experts, dtype, grad_dtype, _), params in _by_kind(names, ddp_config).items():
        layouts = lay_out_params(
            params,
            dp_size=groups.whole.size() if is_sharded else None,
            bucket_size=bucket_size,
            num_buckets=num_buckets,
            for_high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
        )
        buffers.append(
            BufferPlan(
                param_dtype=dtype,
                gathered_dtype=dtype,
                grad_dtype=grad_dtype,
                shard_grad_dtype=grad_dtype,
                holds_params=is_sharded,
                releases_grads=ddp_config.sharding_strategy == "optim_grads" and num_shards > 1,
                holds_experts=holds_experts,
                accumulated_in_fp32=accumulated_in_fp32((names.of[p][0] for p in params), grad_dtype, ddp_config),
                buckets=tuple(plan_bucket(names, params, layout, num_shards) for layout in layouts),
            )
        )
    return tuple(buffers)


def _overlaps(asked: bool | None, by_default: bool = True) -> bool:
    return by_default and device.device_type() == "cuda" if asked is None else asked


def full_param_layout(
    params: Sequence[nn.Parameter],
    bucket_size: int | None,
    dp_size: int,
    ddp_config: DistributedDataParallelConfig,
) -> FullParamLayout:
    """Returns the places that `plan_flat` gives these parameters where a strategy shards.

    Args:
        params: those that require gradients, in order.
        bucket_size: elements; None means one bucket for each kind of parameter, unless `ddp_config` says how many.
        dp_size: ranks that share a bucket.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in reversed(params):
        kinds.setdefault(kind_of(param, ddp_config), []).append(param)
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


def lay_out_params(
    params: Sequence[nn.Parameter], *, dp_size: int | None, separates_shared: bool = True, **options: Any
) -> list[BucketLayout]:
    """Lays out parameters, which come in reverse order of construction. `options` go to `lay_out`.

    Where buckets are cut, a weight that carries ``shared_embedding`` has one of its own, as in Megatron-LM: it is read
    outside its module too. Weights of tensor-parallel layers are aligned, since their gradients are computed in place.
    """
    shared = [index for index, param in enumerate(params) if getattr(param, "shared_embedding", False)]
    return lay_out(
        [param.numel() for param in params],
        dp_size=dp_size,
        alone=shared if dp_size and separates_shared else (),
        aligned={index for index, param in enumerate(params) if has_tensor_parallel_attributes(param)},
        **options,
    )


def is_expert_parameter(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter has Megatron-LM's mark: its gradient belongs to the experts' data-parallel group."""
    return not getattr(parameter, "allreduce", True)


def _by_kind(names: ParameterNames, ddp_config: DistributedDataParallelConfig) -> dict[Any, list[nn.Parameter]]:
    """Returns trainable parameters of one buffer each, in reverse order of construction."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in reversed(list(names.of)):
        name = names.of[param][0]
        reject_unfit_parameter(name, param)
        if param.requires_grad:
            kinds.setdefault(kind_of(param, ddp_config), []).append(param)
    return kinds


Kind = tuple[bool, torch.dtype, torch.dtype, torch.device]
"""What parameters of one buffer share: `kind_of`'s result."""


def kind_of(
    param: nn.Parameter,
    ddp_config: DistributedDataParallelConfig,
    computes_in: torch.dtype | None = None,
    reduces_in: Dtype | None = None,
) -> Kind:
    """Returns what parameters of one buffer have in common: the mark of experts, dtype, dtype of gradients, device.

    Args:
        computes_in: the dtype that the model sees; None is the parameter's.
        reduces_in: the dtype of gradients, where it is asked for.
    """
    grad_dtype = as_dtype(reduces_in) or computes_in or param.dtype
    if ddp_config.grad_reduce_in_fp32:  # to add more exactly, so double precision stays
        grad_dtype = torch.promote_types(grad_dtype, torch.float32)
    place = device.current_device() if param.is_meta else param.device  # where it will be materialized
    return is_expert_parameter(param), param.dtype, grad_dtype, place


def reject_unfit_parameter(name: str, param: nn.Parameter) -> None:
    """Raises where a parameter cannot be moved into a flat buffer."""
    if isinstance(param, DTensor):
        raise WrapError(f"parameter {name} is a DTensor; flat buffers take plain tensors, FSDP2 takes these")
    if hasattr(param, "has_buffer"):
        raise WrapError(f"parameter {name} is in the buffers of a wrapper already; wrap the plain model")


def plan_bucket(
    names: ParameterNames,
    params: Sequence[nn.Parameter],
    layout: BucketLayout,
    num_shards: int,
    cut: Cut = "flat",
) -> BucketPlan:
    """Returns the bucket of a layout of these parameters, each of its shards a part of its elements."""
    length = (layout.end - layout.start) // num_shards
    planned = []
    for index, (start, end) in zip(layout.members, layout.ranges, strict=True):
        bounds = [0, *(min(max(length * shard, start), end) - start for shard in range(1, num_shards)), end - start]
        shape, kind = tuple(params[index].shape), cut if num_shards > 1 else "whole"
        planned.append(names.plan_of(params[index], shape=shape, cut=kind, bounds=tuple(bounds)))
    return BucketPlan(params=tuple(planned), layout=layout)


def _whole(names: ParameterNames, param: nn.Parameter) -> ParamPlan:
    return names.plan_of(param, shape=tuple(param.shape), cut="whole", bounds=(0, param.numel()))


def accumulated_in_fp32(
    names: Iterable[str], grad_dtype: torch.dtype, ddp_config: DistributedDataParallelConfig
) -> frozenset[str]:
    """Returns those of the names of a buffer's parameters whose gradients add up in fp32 memory of their own."""
    if torch.promote_types(grad_dtype, torch.float32) == grad_dtype:
        return frozenset()
    patterns = ddp_config.param_name_patterns_for_fp32_local_accumulation
    return frozenset(name for name in names if any(p == "all" or fnmatch(name, p) for p in patterns))


def order_of_reduction(buffers: Sequence[BufferPlan]) -> tuple[tuple[int, int], ...]:
    """Returns buckets in the order in which backward should finish them: by their first parameter, the last first."""
    place = {
        (index, number): bucket.place
        for index, buffer in enumerate(buffers)
        if buffer.is_trained
        for number, bucket in enumerate(buffer.buckets)
    }
    return tuple(sorted(place, key=lambda key: -place[key]))


def gradients_of_layers(config: Any) -> dict[str, Any]:
    """Returns how layers bring gradients, from ``gradient_accumulation_fusion``.

    The layers of this library compute them in lent memory, unless it is False. In a config of another library True
    says that layers add to ``main_grad`` themselves.
    """
    is_fused = bool(getattr(config, "gradient_accumulation_fusion", True))
    is_of_another = hasattr(config, "gradient_accumulation_fusion") and not isinstance(config, ModelParallelConfig)
    return {"lends_gradients": is_fused, "layers_add_gradients": is_fused and is_of_another}


def check_reduction(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Raises where gradients would be summed and averaged at once."""
    if getattr(config, "calculate_per_token_loss", False) and ddp_config.average_in_collective:
        raise ParallelConfigError(
            "calculate_per_token_loss sums gradients over ranks and average_in_collective averages them; drop one"
        )


def check_precision(config: Any, module: nn.Module) -> None:
    """Raises where a model is to compute in half precision, and all its parameters are fp32."""
    asked = next((name for name in ("bf16", "fp16") if getattr(config, name, False)), None)
    if asked and all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        raise ParallelConfigError(
            f"config.{asked} is set, but every parameter is fp32, and flat buffers compute in the dtype of their "
            "parameters; wrap the model in Float16Module(config, model) first"
        )
